"""Plots that compare drafters, of one result of the command ``heads`` or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_redrafter.bench.lab.heads import Heads
from mlx_redrafter.bench.lab.pooled_heads import PooledHead, Spread, pool
from mlx_redrafter.bench.plots import SPEED, figure, machine_name, sampling_name
from mlx_redrafter.errors import RedrafterError

TOKENS = "tokens/step of the default"


def plot_heads(path: Path, found: Heads, heading: str) -> Path:
    """Draw the speed and the tokens per step of drafters; see `plots.plot_sweep`."""
    return draw(path, pool([{"configuration": {"model": ""}, "found": asdict(found)}]), heading)


def plot_results(path: Path, results: Sequence[Mapping[str, Any]]) -> Path:
    """Draw results of one target; drafters that differ only in their seed become one point.

    Raises:
        RedrafterError: The results are of several targets, or of another benchmark.
    """
    kinds = {result["kind"] for result in results}
    models = {result["configuration"]["model"] for result in results}
    if kinds != {"heads"} or len(models) > 1:
        raise RedrafterError(
            f"expected results of the command heads on one target, found {sorted(kinds)} on "
            f"{sorted(models)}"
        )
    (model,), count = models, len(results)
    heading = f"{model}, on {machine_name(results[0])}\n{count} results"
    return draw(path, pool(results), heading)


def draw(path: Path, found: Sequence[PooledHead], heading: str) -> Path:
    """Draw a row per temperature: speed, and tokens per step, over the tokens of training."""
    temps = list(dict.fromkeys(one.group.temp for one in found))
    kinds = list(dict.fromkeys(one.group.kind for one in found))
    colours = {kind: f"C{place}" for place, kind in enumerate(kinds)}
    is_trained = len({one.group.trained_tokens for one in found} - {None}) > 1
    size = (11.0, 4.0 * len(temps))
    with figure(path, heading, size, rows=len(temps), columns=2, shares_x=is_trained) as grid:
        for pair, temp in zip(grid.reshape(-1, 2), temps, strict=True):
            rows = [one for one in found if one.group.temp == temp]
            speeds = [(one, one.default_speed) for one in rows]
            tokens = [(one, one.default_tokens) for one in rows]
            for axes, values, label in zip(pair, (speeds, tokens), (SPEED, TOKENS), strict=True):
                (_curves if is_trained else _ranges)(axes, values, colours)
                axes.set_title(f"{sampling_name(temp)}: {label}", fontsize=10)
            if is_trained:
                pair[0].legend(fontsize=8)
        if is_trained:
            for axes in grid.reshape(-1, 2)[-1]:
                axes.set_xlabel("tokens of training texts")
    return path


def _curves(
    axes: Any,
    values: Sequence[tuple[PooledHead, Spread | None]],
    colours: Mapping[str, str],
) -> None:
    """Draw a curve through the means of every kind, with bars from minimum to maximum."""
    for kind, colour in colours.items():
        mine = [
            (one.group.trained_tokens, spread)
            for one, spread in values
            if one.group.kind == kind and spread is not None
        ]
        for tokens, spread in mine:
            if tokens is None:  # unknown: a line over all budgets
                axes.axhline(spread.mean, linestyle=":", color=colour, label=kind)
        known = [(tokens, spread) for tokens, spread in mine if tokens is not None]
        if known:
            bars = [
                [spread.mean - spread.low for _, spread in known],
                [spread.high - spread.mean for _, spread in known],
            ]
            style = {"color": colour, "label": kind, "marker": "o", "capsize": 3}
            places, means = [n for n, _ in known], [spread.mean for _, spread in known]
            axes.errorbar(places, means, bars, **style)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_ylim(bottom=0)


def _ranges(
    axes: Any,
    values: Sequence[tuple[PooledHead, Spread | None]],
    colours: Mapping[str, str],
) -> None:
    """Draw mean and range of every kind on a line."""
    known = [(one.group.kind, spread) for one, spread in values if spread is not None]
    for place, (kind, spread) in enumerate(known):
        axes.plot([spread.low, spread.high], [place, place], color=colours[kind], alpha=0.5)
        axes.plot([spread.mean], [place], "o", color=colours[kind])
        axes.annotate(
            f"{spread.mean:.2f}", (spread.mean, place), xytext=(0, 5), ha="center",
            textcoords="offset points", fontsize=8, color=colours[kind],
        )  # fmt: skip
    axes.set_yticks(range(len(known)), [kind for kind, _ in known])
    axes.invert_yaxis()
    axes.margins(y=0.1)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlim(left=0)
