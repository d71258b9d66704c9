"""Plots of the laboratory's results as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.lab.caches import ONE, TREE, CacheCost
from mlx_redrafter.bench.lab.endurance import TIME_RATIO, Window
from mlx_redrafter.bench.lab.profile import Profile
from mlx_redrafter.bench.lab.regret import Regret
from mlx_redrafter.bench.plots import SELECTIONS, SPEED, figure
from mlx_redrafter.bench.runs import AUTO, STOCK
from mlx_redrafter.bench.timing import MedianEstimate


def plot_profile(folder: Path, found: Profile, heading: str) -> list[Path]:
    """Draw the cost of verifying, of drafting, and the parts of a step; see `plot_sweep`."""
    verify = folder / "verify.png"
    with figure(verify, heading) as axes:
        for context in dict.fromkeys(cost.context for cost in found.verify):
            costs = [cost for cost in found.verify if cost.context == context]
            sizes = [cost.tokens for cost in costs]
            axes.plot(sizes, [cost.ratio for cost in costs], marker="o", label=f"{context:,}")
        axes.set_xlabel("tokens per forward pass, T")
        axes.set_ylabel("time by that of one token")
        _from_zero(axes)
        axes.legend(title="tokens before them")
    draft = folder / "draft.png"
    with figure(draft, heading) as axes:
        for width in dict.fromkeys(cost.width for cost in found.draft):
            drafts = [cost for cost in found.draft if cost.width == width]
            levels = [cost.length - 1 for cost in drafts]
            times = [1e3 * cost.seconds.median for cost in drafts]
            axes.plot([0, *levels], [0, *times], marker="o", label=f"{width}")
        axes.set_xticks(range(max(cost.length for cost in found.draft)))
        axes.set_xlabel("levels drafted, L - 1")
        axes.set_ylabel("ms")
        _from_zero(axes)
        axes.legend(title="beam width, W")
    step = folder / "step.png"
    with figure(step, heading, (7.5, 3.0)) as axes:
        parts = {name: 1e3 * part.median for name, part in found.step.parts.items()}
        _stack(axes, "a step of mlx-lm", {"mlx-lm": parts["stock step"]})
        named = {name: parts[name] for name in ("verify", "draft", "accept")}
        rest = max(0.0, parts["step"] - sum(named.values()))
        _stack(axes, "a drafted step", {**named, "commit, host": rest})
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.figure.legend(loc="outside lower center", ncols=3)
        axes.margins(x=0.12)
    return [verify, draft, step]


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


def plot_endurance(path: Path, windows: Sequence[Window], heading: str) -> Path:
    """Draw times and memory against the length of the text; see `plot_sweep`."""
    lengths = [window.length for window in windows]
    with figure(path, heading, (7.5, 8.0), rows=3) as (speed, ratio, memory):
        ours = [1e3 * window.seconds_per_token for window in windows]
        stock = [1e3 * window.forwards[STOCK] for window in windows]
        speed.plot(lengths, stock, marker=".", label=STOCK)
        speed.plot(lengths, ours, marker=".", label="drafted")
        speed.set_ylabel("ms per token")
        ratios = [window.ratio(None) for window in windows]
        ratio.plot(lengths, ratios, marker=".", label="all steps by their verify alone")
        ratio.set_ylabel(f"ratio (may grow by {TIME_RATIO - 1:.0%})")
        for name, sizes in (
            ("beyond weights and K/V rows", [window.memory for window in windows]),
            ("its peak", [window.peak for window in windows]),
        ):
            memory.plot(lengths, [size / 1e6 for size in sizes], marker=".", label=name)
        memory.set_ylabel("MB")
        memory.set_xlabel("tokens of the text")
        for axes in (speed, ratio, memory):
            _from_zero(axes)
            axes.legend()
    return path


def plot_caches(path: Path, found: Sequence[CacheCost], heading: str) -> Path:
    """Draw times and memory of steps against the tokens before them; see `plot_sweep`."""
    with figure(path, heading, (7.5, 6.5), rows=2) as (times, memory):
        for colour, name in enumerate(dict.fromkeys(cost.model for cost in found)):
            costs = [cost for cost in found if cost.model == name]
            contexts = [cost.context for cost in costs]
            for kind, line, label in ((TREE, "-", name), (ONE, ":", None)):
                medians = [1e3 * cost.seconds[kind].median for cost in costs]
                style = {"color": f"C{colour}", "linestyle": line, "marker": "."}
                times.plot(contexts, medians, label=label, **style)
            peaks = [cost.peak / 1e6 for cost in costs]
            memory.plot(contexts, peaks, marker=".", color=f"C{colour}")
        times.set_ylabel("ms per forward pass")
        memory.set_ylabel("peak of a tree beyond the weights, MB")
        memory.set_xlabel("tokens before the pass")
        for axes in (times, memory):
            _from_zero(axes)
        times.legend(title="a tree; dotted: one token")
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


def _stack(axes: Any, name: str, parts: Mapping[str, float]) -> None:
    """Draw one bar of parts in ms, one after the other."""
    left = 0.0
    for part, size in parts.items():
        axes.barh(name, size, left=left, label=f"{part}, {size:.1f}")
        left += size
    axes.text(left, name, f" {left:.1f}", va="center")


def _from_zero(axes: Any) -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
