"""``redrafter-mlx bench compare``: decoding methods on the same prompts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_output import (
    parse_shapes,
    progress,
    refuse_texts,
    show,
    speed_table,
    warn,
)
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.cli.text_options import Temp
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams

if TYPE_CHECKING:
    from mlx_redrafter.bench.runs import EncodedPrompt


@dataclass(frozen=True)
class Prompts:
    """Prompts from a file."""

    prompts: Annotated[
        Path,
        typer.Option(
            help='File of prompts: .jsonl as in MT-bench or Spec-Bench, or with "prompt" or '
            '"text" in each line; or text with empty lines between prompts.',
            show_default=False,
        ),
    ]
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Number of prompts, from all categories alternately; all by default."),
    ] = None

    def __post_init__(self) -> None:
        if self.num_prompts is not None:
            check_int("num_prompts", self.num_prompts, 1)

    def encode(self, tokenizer: Any) -> list[EncodedPrompt]:
        """Encode the prompts as token ids.

        Raises:
            ConfigError: The file has no prompts, or the chat template rejects one.
        """
        from mlx_redrafter.bench.prompts import encode_prompts, read_prompts, select_prompts

        chosen = select_prompts(read_prompts(self.prompts), self.num_prompts)
        return encode_prompts(tokenizer, chosen)


@dataclass(frozen=True)
class Rounds:
    """Texts that several decoding methods generate in interleaved runs."""

    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Maximum number of tokens per text.")
    ] = 128
    repeats: Annotated[int, typer.Option(help="Number of rounds per prompt.")] = 3
    cool_down: Annotated[float, typer.Option(help="Seconds to rest before every run.")] = 0.0

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 1)
        check_int("repeats", self.repeats, 1)
        if not 0 <= self.cool_down < math.inf:
            raise ConfigError(f"cool_down must be 0 seconds or more, got {self.cool_down}")


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
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="JSON file for the result.", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the interrupted benchmark in --out.")
    ] = False,
) -> None:
    """Compare stock mlx-lm, plain decoding, fixed draft shapes and the default.

    Every prompt is decoded with every method, and speeds are relative to stock mlx-lm. The exit
    code is 1 if a text differs from the target's own.
    """
    SamplingParams(temp)
    plans = parse_shapes(shapes)
    target, tokenizer, drafter = pair.load()
    from mlx_redrafter.bench.compare import compare as measure
    from mlx_redrafter.bench.prompts import describe_prompts
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.report import num_different
    from mlx_redrafter.bench.result_file import checkpoint_name, pair_names
    from mlx_redrafter.bench.runs import STOCK_DRAFT, CommonSettings, stock_arm
    from mlx_redrafter.bench.turns import arm_name, compared_arms
    from mlx_redrafter.checkpoints.loading import load

    plans = [plan.within(drafter.max_length) for plan in plans]
    encoded = prompts.encode(tokenizer)
    configuration = {
        **pair_names(pair.model, pair.drafter_name, drafter),
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
        found = measure(
            arms, settings, encoded, rounds.repeats, recording, rounds.cool_down, on_progress
        )
    show(speed_table(found.rows, "all prompts"))
    seconds = recording.result.get("calibration_seconds", 0.0)
    show(f"auto: timing the draft shapes took {seconds:.1f} s, which no answer's time includes")
    for category, rows in found.by_category.items():
        show(speed_table(rows, category))
    warn(recording.result["disturbances"])
    refuse_texts(num_different(found.rows))
