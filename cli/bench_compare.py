"""``redrafter-mlx bench compare`` and ``sweep``: decoding methods on the same prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_redrafter.cli.bench_options import Out, Prompts, Resume, Rounds, ShortRounds, begin
from mlx_redrafter.cli.bench_output import (
    draw,
    parse_ints,
    parse_names,
    parse_shapes,
    parse_temps,
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

if TYPE_CHECKING:
    from mlx_redrafter.bench.sweep import Grid


def compare(
    prompts: Prompts,
    pair: Pair,
    rounds: Rounds,
    stock_draft_model: Annotated[
        str | None, "Also measure mlx-lm's own speculative decoding with this draft model."
    ] = None,
    shapes: Annotated[
        str,
        "Fixed draft shapes to measure, each WIDTHxLENGTH or WIDTHxLENGTHxNODES of a "
        "tree, or beam:WIDTHxLENGTH for merged beams.",
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
    from mlx_redrafter.bench.report import num_different
    from mlx_redrafter.bench.result_file import checkpoint_name
    from mlx_redrafter.bench.runs import STOCK_DRAFT, CommonSettings, stock_arm
    from mlx_redrafter.bench.turns import arm_name, compared_arms
    from mlx_redrafter.bench.turns import compare as measure
    from mlx_redrafter.checkpoints.loading import load

    plans = [plan.within(drafter.max_length) for plan in plans]
    encoded = prompts.encode(tokenizer)
    recording = begin(
        "compare", out, resume, pair, drafter, prompts.prompts, encoded,
        stock_draft_model=stock_draft_model and checkpoint_name(stock_draft_model),
        shapes={arm_name(plan): plan.options for plan in plans},
        temp=temp,
        **asdict(rounds),
    )  # fmt: skip
    settings = CommonSettings(target, tokenizer, drafter, rounds.max_tokens, temp)
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


@dataclass(frozen=True)
class GridOptions:
    """Values to sweep, each a list."""

    widths: Annotated[str, "Beam widths, such as 1-4,8."] = "1-4"
    lengths: Annotated[str, "Beam lengths, counting the root."] = "2-5"
    nodes: Annotated[
        str | None, typer.Option(help="Tree nodes with top_n.", show_default="the default")
    ] = None
    selections: Annotated[
        str, "top_n for the most probable nodes, beam for merged beams, or both."
    ] = "top_n,beam"
    temps: Annotated[str, "Temperatures."] = "0"

    def read(self) -> Grid:
        """Parse the lists.

        Raises:
            ConfigError: A list cannot be read, the grid is too large, or no tree has so many nodes.
        """
        from mlx_redrafter.bench.sweep import Grid

        return Grid(
            parse_ints(self.widths),
            parse_ints(self.lengths),
            (None,) if self.nodes is None else parse_ints(self.nodes),
            parse_names(self.selections, ("top_n", "beam")),  # type: ignore[arg-type]
            parse_temps(self.temps),
        )


def sweep(
    prompts: Prompts,
    out: Annotated[Path, "Folder for JSON and PNG files.", "-o"],
    pair: Pair,
    shapes: GridOptions,
    rounds: ShortRounds,
    resume: Resume = False,
) -> None:
    """Measure a grid of fixed draft shapes, and draw maps of the speed.

    Speeds are relative to stock mlx-lm. The exit code is 1 if a text differs from the target's own.
    """
    grid = shapes.read()
    from mlx_redrafter.bench.plots import count_texts, plot_sweep, title
    from mlx_redrafter.bench.report import num_different
    from mlx_redrafter.bench.runs import CommonSettings
    from mlx_redrafter.bench.sweep import sweep as measure

    target, tokenizer, drafter = pair.load()
    encoded = prompts.encode(tokenizer)
    recording = begin(
        "sweep", out / "sweep.json", resume, pair, drafter, prompts.prompts, encoded,
        grid={name: list(values) for name, values in asdict(grid).items()},
        **asdict(rounds),
    )  # fmt: skip
    settings = CommonSettings(target, tokenizer, drafter, rounds.max_tokens)
    with progress("Turns") as on_progress:
        points = measure(
            settings, grid, encoded, rounds.repeats, recording, rounds.cool_down,
            on_progress=on_progress,
        )  # fmt: skip
    for temp in grid.temps:
        rows = [point.row for point in points if point.temp == temp]
        show(speed_table(rows, f"temperature {temp:g}"))
    heading = title(recording.result, target, count_texts(recording.result["configuration"]))
    draw(lambda: plot_sweep(out, points, heading))
    warn(recording.result["disturbances"])
    refuse_texts(num_different([point.row for point in points]))
