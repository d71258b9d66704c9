"""Plots of results as PNG files. Only this module needs the extra ``plot``."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.utils import get_total_parameters

from mlx_redrafter.bench.report import Row
from mlx_redrafter.bench.runs import PLAIN, STOCK
from mlx_redrafter.bench.sweep import Point
from mlx_redrafter.checkpoint_files import write_atomically
from mlx_redrafter.errors import RedrafterError, how_to_install

# Width and height of a plot, in inches.
SIZE = (7.5, 5.0)
# Names of selections in titles.
SELECTIONS = {"top_n": "best nodes", "beam": "merged beams"}
# Lowest speed, by mlx-lm's, at the end of the colour scale.
SLOWEST = 0.5


class PlotError(RedrafterError):
    """A plot cannot be drawn on this machine."""


def title(result: Mapping[str, Any], model: nn.Module) -> str:
    """Make the title of a plot: model, size, machine, and the decoded texts."""
    size, settings = get_total_parameters(model), result["configuration"]
    short = f"{size / 1e9:.1f}B" if size >= 1e9 else f"{size / 1e6:.3g}M"
    machine = f"{result['machine']['processor']}, {result['machine']['cores']} cores"
    texts = f"{len(settings['prompts'])} prompts, {settings['repeats']} x {settings['max_tokens']}"
    temp = settings.get("temp")  # a sweep has several
    sampling = "" if temp is None else f", {sampling_name(temp)}"
    line = f"{settings['model']}, {short} parameters, on {machine}"
    return f"{line}\n{texts} tokens each{sampling}"


def plot_sweep(folder: Path, points: Sequence[Point], heading: str) -> list[Path]:
    """Draw a map of the speed by width and length for every group of points; return the files."""
    files = []
    for name, group in _groups(points).items():
        path = folder / f"speedup {name}.png".replace(", ", " ").replace(" ", "-")
        with figure(path, heading) as axes:
            _map(axes, group)
            axes.set_title(name, fontsize=10)
        files.append(path)
    return files


def plot_speed(path: Path, rows: Sequence[Row], heading: str, baseline: str = PLAIN) -> Path:
    """Draw the tokens per second of every method in every setting as bars, to publish."""
    shown = [row for row in rows if row.tokens_per_second is not None and not row.category]
    settings = list(dict.fromkeys(row.setting for row in shown))
    methods = list(dict.fromkeys(row.arm for row in shown))
    height = 0.8 / max(1, len(methods))
    with figure(path, heading, (10.0, max(4.0, 0.35 * len(shown) + 1.6))) as axes:
        for number, method in enumerate(methods):
            mine = [row for row in shown if row.arm == method]
            places = [settings.index(row.setting) + number * height for row in mine]
            speeds = [row.tokens_per_second.median for row in mine if row.tokens_per_second]
            bars = axes.barh(places, speeds, height * 0.92, label=method)
            axes.bar_label(bars, [_bar_label(row) for row in mine], padding=4, fontsize=9)
        middle = (len(methods) - 1) * height / 2
        axes.set_yticks([i + middle for i in range(len(settings))], settings)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(f"tokens/s of the batch (times {baseline})")
        if methods:  # texts of one token have no speed
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
    return path


def _bar_label(row: Row) -> str:
    speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second.median:.1f}"
    return speed if row.speedup is None else f"{speed} ({row.speedup.median:.2f}x)"


def _groups(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Group points that differ only in width and length, under a description of the rest."""
    shapes = {(point.temp, point.plan.shape) for point in points}
    has_nodes = len(shapes) < len({(point.temp, point.plan) for point in points})
    groups: dict[str, list[Point]] = {}
    for point in points:
        name = SELECTIONS[point.plan.shape.select]
        if has_nodes and point.plan.shape.select == "top_n":
            name += f", {point.plan.num_nodes} nodes"
        groups.setdefault(f"{name}, {sampling_name(point.temp)}", []).append(point)
    return groups


def sampling_name(temp: float) -> str:
    return f"temperature {temp:g}" if temp else "greedy"


def _map(axes: Any, points: Sequence[Point]) -> None:
    """Draw speeds by width and length, coloured around mlx-lm's speed; frame the best."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.patches import Rectangle

    widths = sorted({point.plan.shape.width for point in points})
    lengths = sorted({point.plan.shape.length for point in points})
    cells = np.full((len(lengths), len(widths)), np.nan)
    speeds = {}
    for point in points:
        if point.row.speedup is not None:
            place = widths.index(point.plan.shape.width), lengths.index(point.plan.shape.length)
            speeds[place] = cells[place[::-1]] = point.row.speedup.median
    slowest, fastest = min(speeds.values(), default=1.0), max(speeds.values(), default=1.0)
    norm = TwoSlopeNorm(1.0, min(SLOWEST, slowest), max(1.01, fastest))
    image = axes.imshow(cells, cmap="RdBu", norm=norm, origin="lower", aspect="auto")
    best = max(speeds, key=speeds.__getitem__, default=None)
    for place, speed in speeds.items():
        is_dark = abs(norm(speed) - 0.5) > 0.3
        axes.text(
            *place, f"{speed:.2f}", ha="center", va="center", fontsize=11,
            color="white" if is_dark else "black", weight="bold" if place == best else "normal",
        )  # fmt: skip
    if best is not None:
        corner = (best[0] - 0.47, best[1] - 0.46)
        axes.add_patch(Rectangle(corner, 0.94, 0.92, fill=False, edgecolor="black", linewidth=3))
    axes.figure.colorbar(image, ax=axes, label=f"times as fast as {STOCK}")
    axes.set_xticks(range(len(widths)), widths)
    axes.set_yticks(range(len(lengths)), lengths)
    axes.set_xlabel("beam width, W")
    axes.set_ylabel("beam length, L")


@contextmanager
def figure(path: Path, heading: str, size: tuple[float, float] = SIZE) -> Iterator[Any]:
    """Yield axes to draw on, then write the file atomically."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"no plots without matplotlib; {how_to_install('plot')}") from error
    drawn = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(heading, fontsize=11)
    yield drawn.subplots()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, partial(drawn.savefig, dpi=120))
