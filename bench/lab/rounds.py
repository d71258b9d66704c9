"""Interleaved timing of jobs.

Machines get hot and are shared. So times to compare are measured alternately in one run, and
compared sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mlx_redrafter.bench.timing import OnProgress

Job = Callable[[], float]


def take_turns(
    jobs: Mapping[str, Job],
    rounds: int,
    warm_up: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, list[float]]:
    """Run every job once per round, each round starting with a different job.

    Args:
        jobs: Jobs by name; each returns its measured seconds.
        rounds: Rounds to record.
        warm_up: Earlier rounds that are not recorded.
        on_progress: Callback for the number of rounds done and their total.

    Returns:
        Samples by job, one per recorded round, in seconds.
    """
    names = list(jobs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(warm_up + rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = jobs[name]()
            if i >= warm_up:
                samples[name].append(seconds)
        on_progress(i + 1, warm_up + rounds)
    return samples


def part_of(on_progress: OnProgress, before: int, total: int) -> OnProgress:
    """Return the progress callback of one part of a benchmark.

    Args:
        on_progress: Callback of the whole benchmark.
        before: Units of work done before this part.
        total: Units of work of the whole benchmark.
    """
    return lambda done, _: on_progress(before + done, total)
