"""Titles and axes of plots, which are PNG files and need the extra ``plot``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.nn as nn
import typer
from mlx_lm.utils import get_total_parameters

from mlx_redrafter.bench.runs import STOCK
from mlx_redrafter.checkpoint_files import write_atomically
from mlx_redrafter.errors import RedrafterError

NO_MATPLOTLIB = "no plots without matplotlib; install mlx-redrafter[plot]"
# Width and height of a plot, in inches.
SIZE = (7.5, 5.0)
# Label of speeds.
SPEED = f"times as fast as {STOCK}"
# Names of selections in titles.
SELECTIONS = {"top_n": "best nodes", "beam": "merged beams"}


class PlotError(RedrafterError):
    """A plot cannot be drawn on this machine."""


def title(result: Mapping[str, Any], model: nn.Module, texts: str = "") -> str:
    """Make the title of a plot: model, size, machine and texts.

    Args:
        result: The result, with its configuration and machine.
        model: The target.
        texts: Description of the decoded texts, if there are any.
    """
    size = get_total_parameters(model)
    short = f"{size / 1e9:.1f}B" if size >= 1e9 else f"{size / 1e6:.3g}M"
    line = f"{result['configuration']['model']}, {short} parameters, on {machine_name(result)}"
    return f"{line}\n{texts}" if texts else line


def machine_name(result: Mapping[str, Any]) -> str:
    """Name the processor of a result's machine."""
    machine = result["machine"]
    return f"{machine['processor']}, {machine['cores']} cores"


def count_texts(configuration: Mapping[str, Any]) -> str:
    """Describe the texts of a benchmark with prompts, for its title."""
    repeats = f"{configuration['repeats']} x {configuration['max_tokens']} tokens each"
    temp = configuration.get("temp")  # a sweep has several
    return f"{len(configuration['prompts'])} prompts, {repeats}" + (
        "" if temp is None else f", {sampling_name(temp)}"
    )


def draw(plot: Callable[[], Sequence[Path]]) -> None:
    """Draw plots and print their paths, or the reason if they cannot be drawn."""
    try:
        for path in plot():
            typer.echo(f"plot: {path}", err=True)
    except PlotError as error:
        typer.echo(f"note: {error}", err=True)


def sampling_name(temp: float) -> str:
    """Name greedy decoding or sampling, for a title."""
    return f"temperature {temp:g}" if temp else "greedy"


@contextmanager
def figure(
    path: Path,
    heading: str,
    size: tuple[float, float] = SIZE,
    rows: int = 1,
    columns: int = 1,
    shares_x: bool = True,
) -> Iterator[Any]:
    """Yield axes to draw on, in rows and columns, then write the file atomically."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(NO_MATPLOTLIB) from error
    drawn = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(heading, fontsize=11)
    yield drawn.subplots(rows, columns, sharex="col" if shares_x else False)
    path.parent.mkdir(parents=True, exist_ok=True)
    save: Callable[[Path], object] = lambda temporary: drawn.savefig(temporary, dpi=120)  # noqa: E731
    write_atomically(path, save)
