"""``redrafter-mlx bench sweep``: a grid of fixed draft shapes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_redrafter.cli.bench_options import Prompts, Resume, ShortRounds, describe_pair
from mlx_redrafter.cli.bench_output import (
    draw,
    parse_ints,
    parse_names,
    parse_temps,
    progress,
    refuse_texts,
    show,
    speed_table,
    warn,
)
from mlx_redrafter.cli.model_options import Pair

if TYPE_CHECKING:
    from mlx_redrafter.bench.sweep import Grid


@dataclass(frozen=True)
class GridOptions:
    """Values to sweep, each a list."""

    widths: Annotated[str, typer.Option(help="Beam widths, such as 1-4,8.")] = "1-4"
    lengths: Annotated[str, typer.Option(help="Beam lengths, counting the root.")] = "2-5"
    nodes: Annotated[
        str | None, typer.Option(help="Tree nodes with top_n.", show_default="the default")
    ] = None
    selections: Annotated[
        str, typer.Option(help="top_n for the most probable nodes, beam for merged beams, or both.")
    ] = "top_n,beam"
    temps: Annotated[str, typer.Option(help="Temperatures.")] = "0"

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
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for JSON and PNG files.")],
    pair: Pair,
    swept: GridOptions,
    rounds: ShortRounds,
    resume: Resume = False,
) -> None:
    """Measure a grid of fixed draft shapes, and draw maps of the speed.

    Speeds are relative to stock mlx-lm. The exit code is 1 if a text differs from the target's own.
    """
    grid = swept.read()
    from mlx_redrafter.bench.plots import count_texts, plot_sweep, title
    from mlx_redrafter.bench.prompts import describe_prompts
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.report import num_different
    from mlx_redrafter.bench.runs import CommonSettings
    from mlx_redrafter.bench.sweep import sweep as measure

    target, tokenizer, drafter = pair.load()
    encoded = prompts.encode(tokenizer)
    configuration = {
        **describe_pair(pair, drafter),
        **describe_prompts(prompts.prompts, encoded),
        "grid": {name: list(values) for name, values in asdict(grid).items()},
        **asdict(rounds),
    }
    settings = CommonSettings(target, tokenizer, drafter, rounds.max_tokens)
    recording = Recording(out / "sweep.json", "sweep", configuration, resume)
    with progress("Turns") as on_progress:
        points = measure(
            settings, grid, encoded, rounds.repeats, recording, rounds.cool_down,
            on_progress=on_progress,
        )  # fmt: skip
    for temp in grid.temps:
        rows = [point.row for point in points if point.temp == temp]
        show(speed_table(rows, f"temperature {temp:g}"))
    heading = title(recording.result, target, count_texts(configuration))
    draw(lambda: plot_sweep(out, points, heading))
    warn(recording.result["disturbances"])
    refuse_texts(num_different([point.row for point in points]))
