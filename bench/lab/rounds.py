"""Rounds of jobs in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mlx_redrafter.bench.timing import OnProgress, rotated

Job = Callable[[], float]


def take_turns(
    jobs: Mapping[str, Job],
    rounds: int,
    warm_up: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, list[float]]:
    """Run every job once per round, each round starting with a different job.

    Each job returns its measured seconds. The first ``warm_up`` rounds are not recorded. Return the
    samples by job, one per recorded round, in seconds.
    """
    names = list(jobs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(warm_up + rounds):
        for name in rotated(names, i):
            seconds = jobs[name]()
            if i >= warm_up:
                samples[name].append(seconds)
        on_progress(i + 1, warm_up + rounds)
    return samples
