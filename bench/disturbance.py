"""Signs that other programs disturbed a measurement, as sentences with advice."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median

from mlx_redrafter.bench.machine import load_averages
from mlx_redrafter.bench.report import summarise
from mlx_redrafter.bench.runs import PLAIN, STOCK, TimedRun
from mlx_redrafter.bench.timing import estimate

# Range of plain decoding's speed relative to stock mlx-lm, which does the same work, when idle.
PLAIN_RATIOS = (0.95, 1.05)
# Maximum distance between the quartiles of repeats on an idle machine, as a share of their median.
MAX_SPREAD = 0.1
# Maximum mean number of busy threads of other programs on an idle machine.
MAX_LOAD = 0.5
# Time constant of the system's load average, in seconds.
LOAD_SECONDS = 60.0
# Minimum measuring time before the load average says something about it, in seconds.
MIN_SECONDS = 20.0
# End of every warning.
ADVICE = "stop other programs, rest between runs (--cool-down), or use more --repeats"


class LoadWatch:
    """Observer of the load by other programs while this process measures."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time(), load_averages()

    def others(self) -> float | None:
        """Estimate the mean number of other programs' running threads since the start.

        The load average of the time before decays by a factor of e per minute, and this process
        counts by its processor time. None in the first seconds, and if the system has no load
        average.
        """
        start, cpu_start, before = self._began
        seconds, now = time.perf_counter() - start, load_averages()
        if not (before and now) or seconds < MIN_SECONDS:
            return None
        kept = math.exp(-seconds / LOAD_SECONDS)
        own = (time.process_time() - cpu_start) / seconds
        return max(0.0, (now[0] - before[0] * kept) / (1 - kept) - own)


def find_disturbances(load: float | None, runs: Sequence[TimedRun] = ()) -> list[str]:
    """List the signs that the times are unreliable, one sentence each.

    ``load`` is that of other programs, from `LoadWatch.others`, and ``runs`` are interleaved.
    """
    found = []
    if load is not None and load > MAX_LOAD:
        found.append(f"other programs kept {load:.1f} threads busy (expected at most {MAX_LOAD:g})")
    both = [run for run in runs if run.arm in (STOCK, PLAIN)]
    plain = [row.speedup for row in summarise(both) if row.arm == PLAIN and row.speedup is not None]
    low, high = PLAIN_RATIOS
    if plain and not low <= plain[0].median <= high:
        found.append(
            f"plain decoding was {plain[0].median:.2f} times as fast as {STOCK}, which does the "
            f"same work (expected {low} to {high})"
        )
    spread = _spread(runs)
    if spread is not None and spread > MAX_SPREAD:
        found.append(
            f"half of the repeats of one text by {STOCK} lie {spread:.0%} apart "
            f"(expected at most {MAX_SPREAD:.0%})"
        )
    return [f"times were disturbed: {sign}; {ADVICE}" for sign in found]


def _spread(runs: Sequence[TimedRun]) -> float | None:
    repeats: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run.arm == STOCK and run.is_timed:
            repeats.setdefault((run.group, run.prompt), []).append(run.seconds_per_token)
    found = [estimate(times) for times in repeats.values() if len(times) > 1]
    shares = [(one.quartiles[1] - one.quartiles[0]) / one.median for one in found]
    return median(shares) if shares else None
