"""Plots of results as PNG. They need the extra ``plot``; everything else works without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.endurance import Window
from mlx_redrafter.bench.profile import Profile
from mlx_redrafter.bench.regret import Regret
from mlx_redrafter.bench.runs import AUTO
from mlx_redrafter.bench.sweep import Point, group_name
from mlx_redrafter.checkpoint import write_atomically
from mlx_redrafter.config import DraftPlan
from mlx_redrafter.errors import RedrafterError

NO_MATPLOTLIB = "no plots without matplotlib; install mlx-redrafter[plot]"


class PlotError(RedrafterError):
    """A plot cannot be drawn here."""


def plot_sweep(folder: Path, points: Sequence[Point], title: str) -> list[Path]:
    """Draw a heat map of the speedup for every group, and speed against acceptance.

    Args:
        folder: Folder for the PNG files.
        points: Results of a sweep.
        title: Title with the names of model and machine.

    Returns:
        The files.

    Raises:
        PlotError: matplotlib is not installed.
    """
    groups: dict[str, list[Point]] = {}
    for point in points:
        nodes = (
            ""
            if point.plan.shape.select == "beam" or _has_default_nodes(point)
            else (f" n{point.plan.num_nodes}")
        )
        name = f"{point.plan.shape.select}{nodes}, {group_name(point.dtype, point.temp)}"
        groups.setdefault(name, []).append(point)
    files = []
    for name, group in groups.items():
        path = folder / f"speedup {name}.png".replace(", ", " ").replace(" ", "-")
        with _figure(path, (6.5, 4.5)) as axes:
            _heat_map(axes, group)
            axes.set_title(f"{title}\n{name}: speedup over mlx-lm", fontsize=9)
        files.append(path)
    path = folder / "speed-and-acceptance.png"
    with _figure(path, (6.5, 4.5)) as axes:
        for name, group in groups.items():
            pairs = [
                (point.row.tokens_per_step, point.row.speedup.median)
                for point in group
                if point.row.tokens_per_step is not None and point.row.speedup is not None
            ]
            axes.scatter([x for x, _ in pairs], [y for _, y in pairs], s=14, label=name)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xlabel("tokens per step")
        axes.set_ylabel("speedup over mlx-lm")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7)
    return [*files, path]


def plot_profile(folder: Path, found: Profile, title: str) -> list[Path]:
    """Draw the cost of verifying, of drafting, and the parts of a step; see `plot_sweep`."""
    verify = folder / "verify.png"
    with _figure(verify, (6.5, 4.5)) as axes:
        for context in dict.fromkeys(cost.context for cost in found.verify):
            costs = [cost for cost in found.verify if cost.context == context]
            sizes = [cost.tokens for cost in costs]
            axes.plot(sizes, [cost.ratio for cost in costs], marker="o", label=f"{context} tokens")
        axes.set_xlabel("tokens per forward pass, T")
        axes.set_ylabel("verify(T) / verify(1)")
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9)
        axes.legend(title="context", fontsize=7)
    draft = folder / "draft.png"
    with _figure(draft, (6.5, 4.5)) as axes:
        for width in dict.fromkeys(cost.width for cost in found.draft):
            drafts = [cost for cost in found.draft if cost.width == width]
            levels = [cost.length - 1 for cost in drafts]
            times = [1e3 * cost.seconds.median for cost in drafts]
            axes.plot(levels, times, marker="o", label=f"{width}")
        axes.set_xlabel("levels, L - 1")
        axes.set_ylabel("drafting, ms")
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9)
        axes.legend(title="beam width", fontsize=7)
    step = folder / "step.png"
    with _figure(step, (6.5, 2.5)) as axes:
        names = ["stock step", "step", "verify", "draft", "accept", "commit"]
        parts = [found.step.parts[name] for name in names]
        axes.barh(names[::-1], [1e3 * part.median for part in parts][::-1])
        axes.set_xlabel("ms")
        axes.set_title(title, fontsize=9)
    return [verify, draft, step]


def plot_regret(path: Path, found: Regret) -> Path:
    """Draw the speed of every way of decoding with its interval; see `plot_sweep`."""
    with _figure(path, (6.5, 4.5)) as axes:
        rows = [row for row in found.rows if row.speedup is not None]
        for place, row in enumerate(rows[::-1]):
            assert row.speedup is not None
            speed = row.speedup
            axes.plot([speed.low, speed.high], [place, place], color="grey")
            axes.plot([speed.median], [place], "o", color="C1" if row.arm == AUTO else "C0")
        axes.set_yticks(range(len(rows)), [row.arm for row in rows[::-1]])
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.set_xlabel("speedup over mlx-lm")
    return path


def plot_endurance(path: Path, windows: Sequence[Window], title: str) -> Path:
    """Draw step times and memory against the length of the text; see `plot_sweep`."""
    with _figure(path, (6.5, 4.5)) as axes:
        for name in dict.fromkeys(name for window in windows for name in window.steps):
            own = [window for window in windows if name in window.steps]
            times = [1e3 * window.steps[name].median for window in own]
            axes.plot([window.length for window in own], times, marker=".", label=f"step, {name}")
        lengths = [window.length for window in windows]
        for name in windows[0].forwards:
            times = [1e3 * window.forwards[name] for window in windows]
            axes.plot(lengths, times, linestyle=":", label=f"{name} alone")
        axes.set_xlabel("tokens of the text")
        axes.set_ylabel("ms")
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9)
        memory = axes.twinx()
        used = [window.memory / 1e6 for window in windows]
        memory.plot(lengths, used, color="black", linestyle="--", label="memory")
        memory.set_ylabel("MB beyond weights and K/V rows")
        memory.set_ylim(bottom=0)
        axes.figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    return path


def _has_default_nodes(point: Point) -> bool:
    return point.plan == DraftPlan.of(point.plan.shape.width, point.plan.shape.length)


def _heat_map(axes: Any, points: Sequence[Point]) -> None:
    widths = sorted({point.plan.shape.width for point in points})
    lengths = sorted({point.plan.shape.length for point in points})
    cells = [[float("nan")] * len(widths) for _ in lengths]
    for point in points:
        row, column = lengths.index(point.plan.shape.length), widths.index(point.plan.shape.width)
        if point.row.speedup is not None:
            cells[row][column] = point.row.speedup.median
            text = f"{point.row.speedup.median:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
    image = axes.imshow(cells, cmap="RdYlGn", origin="lower", vmin=0.5, vmax=1.5, aspect="auto")
    axes.figure.colorbar(image, ax=axes)
    axes.set_xticks(range(len(widths)), widths)
    axes.set_yticks(range(len(lengths)), lengths)
    axes.set_xlabel("beam width")
    axes.set_ylabel("beam length")


@contextmanager
def _figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Axes to draw on; the file is written afterwards, whole or not at all."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(NO_MATPLOTLIB) from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure.add_subplot()
    path.parent.mkdir(parents=True, exist_ok=True)
    save: Callable[[Path], object] = lambda temporary: figure.savefig(temporary, dpi=120)  # noqa: E731
    write_atomically(path, save)
