"""A result file that grows with every run, so that an interrupted benchmark can be resumed.

It has the signs that other programs disturbed the runs, as sentences with advice.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

from mlx_redrafter.bench.machine import load_averages
from mlx_redrafter.bench.report import summarise
from mlx_redrafter.bench.result_file import new_result, read_result, write_result
from mlx_redrafter.bench.runs import PLAIN, STOCK, TimedRun
from mlx_redrafter.bench.timing import estimate
from mlx_redrafter.errors import CheckpointError, ConfigError

# Parts of a result that must be equal for a benchmark to be resumed, () for all of a part.
FIXED: Mapping[str, tuple[str, ...]] = {
    "configuration": (),
    "versions": (),
    "machine": ("processor", "cores", "device"),
}
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


class Recording:
    """The runs of a benchmark, kept in a file after every turn.

    ``result`` is the content of the file except the ``runs``; the benchmark adds its results.
    """

    def __init__(
        self,
        path: Path | None,
        kind: str,
        configuration: Mapping[str, Any],
        resume: bool = False,
        overwrite: bool = False,
    ):
        """Start a recording, or resume the one in the file if that has the same settings.

        ``configuration`` consists of JSON values. Without a path no file is written.
        """
        self.path = path
        self.runs: list[TimedRun] = []
        self.result = new_result(kind, configuration)
        self._watch = LoadWatch()
        self._sitting = {key: self.result[key] for key in ("measured_at", "machine", "commit")}
        self.result["sittings"] = [self._sitting]
        if path is not None and path.exists():
            if resume:
                self._continue(path, kind)
            elif not overwrite:
                raise ConfigError(f"{path} exists; resume it with --resume, or choose another file")
        self.write()  # before the runs; another benchmark finds the file
        self._done = {run.turn for run in self.runs}

    def has(self, turn: tuple[str, int, str, int]) -> bool:
        return turn in self._done

    def add(self, runs: Iterable[TimedRun]) -> None:
        self.runs.extend(runs)
        self._done.update(run.turn for run in self.runs)
        self._sitting["load_of_others"] = self._watch.others()
        self.write()

    def finish(self, has_servers: bool = False, **found: Any) -> None:
        """Add the results and the signs of disturbed times, and write the file.

        The load of servers that worked for the benchmark is no such sign.
        """
        loads = (sitting.get("load_of_others") for sitting in self.result["sittings"])
        load = max((load for load in loads if load is not None), default=None)
        load = None if has_servers else load
        self.result |= {**found, "disturbances": find_disturbances(load, self.runs)}
        self.write()

    def write(self) -> None:
        if self.path is not None:
            write_result(self.path, {**self.result, "runs": self.runs})

    def _continue(self, path: Path, kind: str) -> None:
        before, names = read_result(path, kind), {field.name for field in fields(TimedRun)}
        try:
            for key, fixed in FIXED.items():
                found, expected = before[key], self.result[key]
                for name in fixed or expected:
                    if found.get(name) != expected[name]:
                        raise ConfigError(
                            f"{path} was measured with {name} {found.get(name)!r}, now it is "
                            f"{expected[name]!r}; resume with the same settings or choose another "
                            "file"
                        )
            runs, sittings = before.pop("runs"), [*before["sittings"], self._sitting]
            is_known = all(set(values) == names for values in runs)
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r}); choose another file") from error
        if not is_known:
            raise ConfigError(f"{path} is of another version of this program; choose another file")
        self.runs = [TimedRun(**values) for values in runs]
        self.result = {**before, "sittings": sittings}


class LoadWatch:
    """Observer of the load by other programs while this process measures."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time(), load_averages()

    def others(self) -> float | None:
        """Estimate the mean number of other programs' running threads since the start.

        The load average of the time before decays by a factor of e per minute, and this process
        counts by its processor time. None in the first seconds, and without a load average.
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
