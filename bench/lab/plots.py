"""Plot of the regret as PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.lab.regret import Regret
from mlx_redrafter.bench.plots import SELECTIONS, SPEED, figure
from mlx_redrafter.bench.runs import AUTO
from mlx_redrafter.bench.timing import MedianEstimate


def plot_regret(path: Path, found: Regret, heading: str) -> Path:
    """Draw the speed of every decoding method with its interval; see `plot_sweep`."""
    speeds = {row.arm: row.speedup for row in found.rows if row.speedup is not None}
    colours = {AUTO: "C1", found.best: "C2"}
    with figure(path, heading) as axes:
        names = {AUTO: "default", found.best: f"best fixed, {_arm(found.best)}"}
        shown = {names.get(arm, _arm(arm)): speed for arm, speed in speeds.items()}
        _intervals(axes, shown, {names[arm]: colour for arm, colour in colours.items()})
        axes.set_xlabel(f"{SPEED}; lines: {_spread(found.ratio.kind)}")
    return path


def _spread(kind: str) -> str:
    return "95% interval of the median" if kind == "95%" else kind or "one text"


def _arm(name: str) -> str:
    """Name a decoding method in plain words, and shapes by letters and numbers."""
    select, *sizes = name.split()
    if select not in SELECTIONS:
        return name
    merged = f"{SELECTIONS[select]}, " if select == "beam" else ""
    return merged + " ".join(sizes).upper()


def _intervals(axes: Any, speeds: Mapping[str, MedianEstimate], colours: Mapping[str, str]) -> None:
    """Draw one line of speed and interval per name."""
    for place, (name, speed) in enumerate(speeds.items()):
        colour = colours.get(name, "C0")
        axes.plot([speed.low, speed.high], [place, place], color=colour, alpha=0.5)
        axes.plot([speed.median], [place], "o", color=colour)
        axes.annotate(
            f"{speed.median:.2f}", (speed.median, place), xytext=(0, 5), ha="center",
            textcoords="offset points", fontsize=8, color=colour,
        )  # fmt: skip
    axes.set_yticks(range(len(speeds)), list(speeds))
    axes.invert_yaxis()
    axes.margins(y=0.07)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlim(left=0)
