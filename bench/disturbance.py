"""Signs that a measurement was disturbed, in sentences that say what to do."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median

from mlx_redrafter.bench.machine import load_averages
from mlx_redrafter.bench.report import summarise
from mlx_redrafter.bench.runs import PLAIN, STOCK, Run
from mlx_redrafter.bench.timing import estimate

# Speed of plain decoding by stock mlx-lm's, which does the same work.
PLAIN_RATIOS = (0.95, 1.05)
# Largest distance of the quartiles of repeats, as a share of their median.
MOST_SPREAD = 0.1
# Threads of other programs that run or wait, on average.
MOST_LOAD = 0.5
# Time constant of the system's load average, and the least time that it says something of.
LOAD_SECONDS, LEAST_SECONDS = 60.0, 20.0
ADVICE = "stop other programs, rest between runs (--cool-down), or take more --repeats"


class LoadWatch:
    """The machine's load by other programs while this process measures."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time(), load_averages()

    def others(self) -> float | None:
        """Mean number of other programs' threads that ran or waited, so far.

        The load average forgets what was before by a factor of e per minute, and counts this
        process by the processor time that it takes. None where the system has no such number, and
        in the first seconds.
        """
        start, cpu_start, before = self._began
        seconds, now = time.perf_counter() - start, load_averages()
        if not (before and now) or seconds < LEAST_SECONDS:
            return None
        kept = math.exp(-seconds / LOAD_SECONDS)
        own = (time.process_time() - cpu_start) / seconds
        return max(0.0, (now[0] - before[0] * kept) / (1 - kept) - own)


def find_disturbances(load: float | None, runs: Sequence[Run] = ()) -> list[str]:
    """What says that times are not to be trusted.

    Args:
        load: Load by other programs, as of `LoadWatch.others`.
        runs: Runs made in turns, if the benchmark decodes texts.
    """
    found = []
    if load is not None and load > MOST_LOAD:
        found.append(
            f"other programs kept {load:.1f} threads busy (at most {MOST_LOAD:g} is quiet)"
        )
    both = [run for run in runs if run.arm in (STOCK, PLAIN)]
    plain = [row.speedup for row in summarise(both) if row.arm == PLAIN and row.speedup is not None]
    low, high = PLAIN_RATIOS
    if plain and not low <= plain[0].median <= high:
        found.append(
            f"plain decoding was {plain[0].median:.2f} times as fast as {STOCK}, which does the "
            f"same work ({low} to {high} is quiet)"
        )
    spread = _spread(runs)
    if spread is not None and spread > MOST_SPREAD:
        found.append(
            f"half of the repeats of one text by {STOCK} lie {spread:.0%} apart "
            f"(at most {MOST_SPREAD:.0%} is quiet)"
        )
    return [f"times were disturbed: {sign}; {ADVICE}" for sign in found]


def _spread(runs: Sequence[Run]) -> float | None:
    """Distance of the quartiles of a text's repeats by their median; None without repeats."""
    repeats: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run.arm == STOCK and run.is_timed:
            repeats.setdefault((run.group, run.prompt), []).append(run.seconds_per_token)
    found = [estimate(times) for times in repeats.values() if len(times) > 1]
    shares = [(one.quartiles[1] - one.quartiles[0]) / one.median for one in found]
    return median(shares) if shares else None
