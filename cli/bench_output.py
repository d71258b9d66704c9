"""Numbers read and results shown by the benchmark commands."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from mlx_redrafter.cli.progress import progress_bar
from mlx_redrafter.errors import ConfigError


def parse_count(text: str) -> int:
    """A number such as 200000, 150M or 0.2B."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMB]?)", text.strip(), re.IGNORECASE)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or number <= 0:
        raise ConfigError(f"expected a number such as 200000, 150M or 0.2B, got {text!r}")
    return int(number * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[match[2].upper()])


def parse_ints(text: str) -> tuple[int, ...]:
    """Numbers such as 1,2,4-6, each at least 1."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ConfigError(f"expected numbers such as 1,2,4-6, got {text!r}")
        numbers.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(dict.fromkeys(numbers))


def parse_names(text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Names such as top_n,beam, each one of those allowed."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in allowed:
            raise ConfigError(f"expected some of {', '.join(allowed)}, got {name!r}")
    return names


def parse_temps(text: str) -> tuple[float, ...]:
    """Temperatures such as 0,0.7,1, each 0 or more."""
    try:
        temps = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"expected temperatures such as 0,0.7,1, got {text!r}") from None
    if min(temps) < 0:
        raise ConfigError(f"temperatures must be 0 or more, got {text!r}")
    return temps


def parse_shares(text: str) -> tuple[float, ...]:
    """Shares such as 0.6,0.8,1, each from 0 to 1."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"expected shares such as 0.6,0.8,1, got {text!r}") from None
    if not all(0 <= share <= 1 for share in shares):
        raise ConfigError(f"shares must be from 0 to 1, got {text!r}")
    return shares


def draw(plot: Callable[[], Sequence[Path]]) -> None:
    """Draw plots and print their paths, or the reason for none."""
    from mlx_redrafter.bench.plots import PlotError

    try:
        for path in plot():
            typer.echo(f"plot: {path}", err=True)
    except PlotError as error:
        typer.echo(f"note: {error}", err=True)


def refuse_texts(num_different: int) -> None:
    """End with exit code 1 if texts are not the target's own."""
    if num_different:
        typer.echo(
            f"{num_different} texts are not the target's own; in float16 and bfloat16 ties may "
            "break differently, `redrafter-mlx check` shows how close they are",
            err=True,
        )
        raise typer.Exit(1)


def warn(disturbances: Sequence[str]) -> None:
    """Print what may have disturbed a measurement to stderr, each in one line."""
    for line in disturbances:
        typer.echo(f"warning: {line}", err=True)


def show(*lines: object) -> None:
    """Print to stdout, wide enough for every table if that is not a terminal."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for line in lines:
        console.print(line)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A callback that shows what is done, how much there is, and the time left, on stderr."""
    with progress_bar(label) as bar:
        task = bar.add_task(label)
        yield lambda done, total: bar.update(task, completed=done, total=total)
