"""Times of this package's kernels and of MLX's, kept per machine.

Axes: T rows of inputs, or nodes of a tree.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import median

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.kernels.small_t import ROWS
from mlx_redrafter.measured import Timed, load_or_measure

logger = logging.getLogger(__name__)

# Rounds timed of either, in turns, after one that is not.
ROUNDS = 5

Results = Callable[[], list[mx.array]]


@dataclass(frozen=True)
class Times:
    """Seconds of one result, MLX's and ours."""

    stock: float
    kernel: float

    def is_at_most(self, share: float) -> bool:
        """Whether ours takes at most this share of MLX's time."""
        return self.kernel <= share * self.stock


def time_in_turns(stock: Results, kernel: Results) -> Times:
    """Median seconds of a result. Waits for the device.

    Args:
        stock: Function that builds MLX's results.
        kernel: Function that builds as many of ours.
    """
    turns: list[tuple[float, ...]] = []
    for _ in range(1 + ROUNDS):
        turns.append(tuple(_seconds(results) for results in (stock, kernel)))
    return Times(*(median(seconds) for seconds in zip(*turns[1:], strict=True)))


def known_times(
    shape: object, what: object, modules: Collection[nn.Module], measure: Callable[[int], Times]
) -> dict[int, Times]:
    """Times by T, measured once per machine.

    Args:
        shape: Shape that the kernel is timed for.
        what: Anything else that the times depend on; its ``repr`` counts.
        modules: Modules timed, as in `load_or_measure`.
        measure: Times for T.
    """

    def measure_all() -> Timed:
        logger.info("timing the kernel for %s, once on this machine", shape)
        seconds: dict[str, float] = {}
        for rows in ROWS:
            times = measure(rows)
            seconds |= {f"stock {rows}": times.stock, f"kernel {rows}": times.kernel}
        return Timed(seconds)

    # The build of the system brings the compiler and the driver.
    known = shape, what, platform.version()
    keys = [f"{way} {rows}" for rows in ROWS for way in ("stock", "kernel")]
    seconds = load_or_measure(known, modules, keys, measure_all)
    return {rows: Times(seconds[f"stock {rows}"], seconds[f"kernel {rows}"]) for rows in ROWS}


def _seconds(results: Results) -> float:
    """Seconds per result."""
    start = time.perf_counter()
    found = results()
    mx.eval(found)
    return (time.perf_counter() - start) / len(found)
