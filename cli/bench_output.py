"""Parsers of lists, and output of results, for the benchmark commands."""

import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from mlx_redrafter.cli.progress import progress_bar
from mlx_redrafter.draft_plan import DraftPlan, Selection
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams

# Maximum length of a list of numbers; every number costs at least one measurement.
MAX_NUMBERS = 1000


def parse_count(text: str) -> int:
    """Parse a number such as 200000, 150M or 0.2B."""
    pattern = r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMB]?)"
    match = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
    units = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}
    count = 0.0 if match is None else float(match[1]) * units[match[2].upper()]
    if not 1 <= count < math.inf:
        raise ConfigError(f"expected a number such as 200000, 150M or 0.2B, got {text!r}")
    return int(count)


def parse_ints(text: str) -> tuple[int, ...]:
    """Parse numbers such as 1,2,4-6, each at least 1, at most `MAX_NUMBERS` of them."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part)
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ConfigError(f"expected numbers such as 1,2,4-6, got {text!r}")
        span = range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(numbers) + len(span) > MAX_NUMBERS:
            raise ConfigError(f"expected a list of at most {MAX_NUMBERS} numbers, got {text!r}")
        numbers.extend(span)
    return tuple(dict.fromkeys(numbers))


def parse_temps(text: str) -> tuple[float, ...]:
    """Parse temperatures such as 0,0.7,1, each one that a text may have, without repetitions."""
    try:
        temps = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"expected temperatures such as 0,0.7,1, got {text!r}") from None
    for temp in temps:
        SamplingParams(temp)
    return temps


def parse_shapes(text: str) -> list[DraftPlan]:
    """Parse draft shapes such as 1x5,4x5x9,beam:4x5 into plans, without repetitions."""
    plans = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(beam:)?(\d+)x(\d+)(?:x(\d+))?\s*", part)
        if match is None:
            raise ConfigError(f"expected draft shapes such as 1x5,4x5x9,beam:4x5, got {text!r}")
        nodes = None if match[4] is None else int(match[4])
        select: Selection = "beam" if match[1] else "top_n"
        plans.append(DraftPlan.of(int(match[2]), int(match[3]), nodes, select))
    return list(dict.fromkeys(plans))


def draw(plot: Callable[[], Sequence[Path]]) -> None:
    """Draw plots and print their paths, or the reason if they cannot be drawn."""
    from mlx_redrafter.bench.plots import PlotError

    try:
        for path in plot():
            typer.echo(f"plot: {path}", err=True)
    except PlotError as error:
        typer.echo(f"note: {error}", err=True)


def refuse_texts(num_different: int) -> None:
    """Exit with code 1 if texts differ from the target's own."""
    if num_different:
        typer.echo(
            f"{num_different} texts differ from the target's own; in float16 and bfloat16 ties may "
            "break differently, `redrafter-mlx check` shows how close they are",
            err=True,
        )
        raise typer.Exit(1)


def warn(disturbances: Sequence[str]) -> None:
    """Print the signs of a disturbed measurement to stderr, one per line."""
    for line in disturbances:
        typer.echo(f"warning: {line}", err=True)


def show_lines(table: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table, the first line with the columns' names, in the width of the terminal or 80.

    A table that is wider becomes a list: a row is a paragraph, and each of its cells a line.
    """
    columns, *rows = table
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    room = shutil.get_terminal_size().columns
    lines = [title] if title else []
    if sum(widths) + 2 * (len(widths) - 1) <= room:
        for row in table:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
    else:
        for row in rows:
            named = zip(columns, row, strict=True)
            lines += ["", *(f"{name}: {cell}" for name, cell in named if cell)]
    typer.echo("\n".join(lines))


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that shows work done, total and time left, on stderr."""
    with progress_bar(label) as bar:
        task = bar.add_task(label)
        yield lambda done, total: bar.update(task, completed=done, total=total)
