"""``redrafter-mlx bench compare`` and ``sweep``: speed against stock mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_options import Prompts, Resume, Rounds, Shape, ShortRounds
from mlx_redrafter.cli.bench_output import (
    draw,
    parse_ints,
    parse_names,
    parse_temps,
    progress,
    refuse_texts,
    show,
    warn,
)
from mlx_redrafter.cli.model_options import Pair, Predraft
from mlx_redrafter.cli.text_options import Seed, Temp, library_option
from mlx_redrafter.draft_plan import MAX_OUTCOMES
from mlx_redrafter.generation_options import SamplingParams

if TYPE_CHECKING:
    from mlx_redrafter.bench.report import Row
    from mlx_redrafter.bench.sweep import Grid
    from mlx_redrafter.bench.timing import Estimate


@dataclass(frozen=True)
class StockDrafting:
    """Speculative decoding by mlx-lm itself."""

    stock_draft_model: Annotated[
        str | None, typer.Option(help="Small model for mlx-lm's own speculative decoding.")
    ] = None
    num_draft_tokens: Annotated[int, typer.Option(help="Drafts of that model per step.")] = 3

    def __post_init__(self) -> None:
        check_int("num_draft_tokens", self.num_draft_tokens, 1)

    def load(self) -> Any:
        """The small model, None if there is none."""
        from mlx_redrafter.checkpoints.loading import load

        return None if self.stock_draft_model is None else load(self.stock_draft_model)[0]

    def describe(self) -> dict[str, Any]:
        """What a result says of it."""
        from mlx_redrafter.bench.result_file import checkpoint_name

        name = self.stock_draft_model and checkpoint_name(self.stock_draft_model)
        return {"stock_draft_model": name, "num_draft_tokens": self.num_draft_tokens}


@dataclass(frozen=True)
class GridOptions:
    """What is swept, each a list."""

    widths: Annotated[str, typer.Option(help="Beam widths, such as 1-4,8.")] = "1-4"
    lengths: Annotated[str, typer.Option(help="Beam lengths.")] = "2-5"
    nodes: Annotated[
        str | None, typer.Option(help="Tree nodes with top_n.", show_default="the default")
    ] = None
    selections: Annotated[str, typer.Option(help="top_n, beam or both.")] = "top_n,beam"
    dtypes: Annotated[
        str | None, typer.Option(help="float32, float16, bfloat16.", show_default="the model's")
    ] = None
    temps: Annotated[str, typer.Option(help="Temperatures.")] = "0"

    def read(self) -> Grid:
        """The grid.

        Raises:
            ConfigError: A list cannot be read, or no tree has as many nodes.
        """
        from mlx_redrafter.bench.sweep import DTYPES, Grid

        return Grid(
            parse_ints(self.widths),
            parse_ints(self.lengths),
            (None,) if self.nodes is None else parse_ints(self.nodes),
            parse_names(self.selections, ("top_n", "beam")),  # type: ignore[arg-type]
            (None,) if self.dtypes is None else parse_names(self.dtypes, tuple(DTYPES)),
            parse_temps(self.temps),
        )


def compare(
    prompts: Prompts,
    pair: Pair,
    stock: StockDrafting,
    rounds: Rounds,
    shape: Shape,
    temp: Temp = 0.0,
    seed: Seed = 0,
    predraft: Predraft = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file.")] = None,
    resume: Resume = False,
) -> None:
    """Compare stock mlx-lm, plain decoding, beams, best nodes and auto on the same prompts.

    With --predraft every way that drafts is there twice. The exit code is 1 if a text is not the
    target's own.
    """
    SamplingParams(temp, seed=seed)
    check_int("predraft", predraft, 0, MAX_OUTCOMES)
    plans = [shape.plan("beam"), shape.plan()]
    target, tokenizer, drafter = pair.load()
    from mlx_redrafter.bench.compare import compare as measure
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.report import num_different
    from mlx_redrafter.bench.result_file import pair_names
    from mlx_redrafter.bench.runs import Setting
    from mlx_redrafter.bench.turns import arm_name

    plans = [shape.fitted(plan, drafter.max_length) for plan in plans]
    encoded = prompts.encode(tokenizer)
    configuration = {
        **pair_names(pair.model, pair.drafter_name, drafter),
        **stock.describe(),
        **prompts.describe(encoded),
        **rounds.describe(),
        "temp": temp,
        "seed": seed,
        **({"predraft": predraft} if predraft else {}),
        "shapes": {arm_name(plan): plan.options for plan in plans},
    }
    setting = Setting(target, tokenizer, drafter, rounds.max_tokens, temp, seed)
    recording = Recording(out, "compare", configuration, resume)
    with progress("Turns") as on_progress:
        found = measure(
            setting, plans, encoded, rounds.repeats, recording, stock.load(),
            stock.num_draft_tokens, rounds.cool_down, rounds.max_repeated, on_progress, predraft
        )  # fmt: skip
    show(speed_table(found.rows, "all prompts"))
    for name, hits in found.hits.items():
        show(f"{name}: {hits.foreseen} of {hits.passes} outcomes were drafted for")
    calibration = recording.result.get("calibration_seconds", 0.0)
    show(f"auto: timing the plans took {calibration:.1f} s, which no answer's time includes")
    for category, rows in found.by_category.items():
        show(speed_table(rows, category))
    warn(recording.result["disturbances"])
    refuse_texts(num_different(found.rows))


def sweep(
    prompts: Prompts,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for JSON, CSV and PNG.")],
    pair: Pair,
    swept: GridOptions,
    rounds: ShortRounds,
    couple: Annotated[bool, library_option("couple")] = True,
    seed: Seed = 0,
    shapes_per_block: Annotated[int, typer.Option(help="Shapes per run of stock mlx-lm.")] = 4,
    resume: Resume = False,
) -> None:
    """Sweep beam width and length against stock mlx-lm: JSON, Apple's CSV tables, plots.

    The exit code is 1 if a text is not the target's own.
    """
    check_int("shapes_per_block", shapes_per_block, 1)
    SamplingParams(seed=seed)
    from mlx_redrafter.bench.plots import count_texts, plot_sweep, title
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.report import num_different
    from mlx_redrafter.bench.result_file import pair_names
    from mlx_redrafter.bench.runs import Setting
    from mlx_redrafter.bench.sweep import sweep as measure
    from mlx_redrafter.bench.sweep import write_tables

    grid = swept.read()
    target, tokenizer, drafter = pair.load()
    encoded = prompts.encode(tokenizer)
    configuration = {
        **pair_names(pair.model, pair.drafter_name, drafter),
        **prompts.describe(encoded),
        "grid": {name: list(values) for name, values in asdict(grid).items()},
        **rounds.describe(),
        "seed": seed,
        "couple": couple,
        "shapes_per_block": shapes_per_block,
    }
    setting = Setting(target, tokenizer, drafter, rounds.max_tokens, seed=seed, couple=couple)
    recording = Recording(out / "sweep.json", "sweep", configuration, resume)
    with progress("Turns") as on_progress:
        points = measure(
            setting, grid, encoded, rounds.repeats, recording, shapes_per_block, rounds.cool_down,
            rounds.max_repeated, on_progress,
        )  # fmt: skip
    write_tables(out, recording.runs, points, rounds.max_tokens)
    for group in dict.fromkeys((point.dtype, point.temp) for point in points):
        rows = [point.row for point in points if (point.dtype, point.temp) == group]
        show(speed_table(rows, f"{group[0]}, temperature {group[1]:g}"))
    heading = title(recording.result, target, count_texts(configuration))
    draw(lambda: plot_sweep(out, points, heading))
    warn(recording.result["disturbances"])
    refuse_texts(num_different([point.row for point in points]))


def speed_table(rows: Sequence[Row], title: str) -> Table:
    columns = (
        "way", "speedup", "interval", "tokens/s", "tokens/step", "nodes/step",
        "accepted by depth", "repeated 4-grams", "prompt speedup", "texts", "different",
    )  # fmt: skip
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        speedup = row.speedup
        table.add_row(
            row.arm,
            _format(speedup),
            "" if speedup is None else speedup.span(),
            _format(row.tokens_per_second, 1),
            "" if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}",
            "" if row.nodes_per_step is None else f"{row.nodes_per_step:.1f}",
            " ".join(f"{rate:.0%}" for rate in row.acceptance_rate_by_depth),
            f"{row.repeated:.0%}",
            _format(row.prompt_speedup),
            str(row.num_texts),
            "" if row.num_different is None else str(row.num_different),
        )
    return table


def _format(value: Estimate | None, digits: int = 2) -> str:
    return "" if value is None else f"{value.median:.{digits}f}"
