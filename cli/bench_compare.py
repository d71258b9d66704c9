"""``redrafter-mlx bench compare``: decoding methods on the same prompts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from mlx_redrafter.cli.bench_options import Out, Prompts, Resume, Rounds, describe_pair
from mlx_redrafter.cli.bench_output import (
    parse_shapes,
    progress,
    refuse_texts,
    show,
    speed_table,
    warn,
)
from mlx_redrafter.cli.machines import launched_group
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.cli.text_options import Temp
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams


def compare(
    prompts: Prompts,
    pair: Pair,
    rounds: Rounds,
    stock_draft_model: Annotated[
        str | None,
        typer.Option(
            help="Also measure mlx-lm's own speculative decoding with this draft model.",
            show_default=False,
        ),
    ] = None,
    shapes: Annotated[
        str,
        typer.Option(
            help="Fixed draft shapes to measure, each WIDTHxLENGTH or WIDTHxLENGTHxNODES of a "
            "tree, or beam:WIDTHxLENGTH for merged beams."
        ),
    ] = "beam:4x5,4x5x9",
    temp: Temp = 0.0,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Compare stock mlx-lm, plain decoding, fixed draft shapes and the default.

    Every prompt is decoded with every method, and speeds are relative to stock mlx-lm. The exit
    code is 1 if a text differs from the target's own.
    """
    SamplingParams(temp)
    plans = parse_shapes(shapes)
    if stock_draft_model is not None and launched_group() is not None:
        raise ConfigError("stock_draft_model is not supported on several machines; leave it out")
    target, tokenizer, drafter = pair.load()
    from mlx_redrafter.bench.compare import compare as measure
    from mlx_redrafter.bench.prompts import describe_prompts
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.report import num_different
    from mlx_redrafter.bench.result_file import checkpoint_name
    from mlx_redrafter.bench.runs import STOCK_DRAFT, CommonSettings, stock_arm
    from mlx_redrafter.bench.turns import arm_name, compared_arms
    from mlx_redrafter.checkpoints.loading import load

    plans = [plan.within(drafter.max_length) for plan in plans]
    encoded = prompts.encode(tokenizer)
    configuration = {
        **describe_pair(pair, drafter),
        "stock_draft_model": stock_draft_model and checkpoint_name(stock_draft_model),
        **describe_prompts(prompts.prompts, encoded),
        **asdict(rounds),
        "temp": temp,
        "shapes": {arm_name(plan): plan.options for plan in plans},
    }
    settings = CommonSettings(target, tokenizer, drafter, rounds.max_tokens, temp)
    recording = Recording(out, "compare", configuration, resume)
    arms = compared_arms(settings, plans)
    if stock_draft_model is not None:
        arms[STOCK_DRAFT] = stock_arm(settings, load(stock_draft_model)[0])
    with progress("Turns") as on_progress:
        rows, by_category = measure(
            arms, settings, encoded, rounds.repeats, recording, rounds.cool_down, on_progress
        )
    show(speed_table(rows, "all prompts"))
    seconds = recording.result.get("calibration_seconds", 0.0)
    show(f"auto: timing the draft shapes took {seconds:.1f} s, which no answer's time includes")
    for category, some in by_category.items():
        show(speed_table(some, category))
    warn(recording.result["disturbances"])
    refuse_texts(num_different(rows))
