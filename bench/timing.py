"""Interleaved timing, and medians of the samples with their uncertainty.

Machines get hot and are shared. So times to compare are measured alternately in one run, and
compared sample by sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

OnProgress = Callable[[int, int], None]

# Bootstrap resamples; more no longer move the ends of the interval visibly.
RESAMPLES = 10_000
# Minimum number of samples for a bootstrap interval; of fewer, the range is as informative.
MIN_SAMPLES = 5


@dataclass(frozen=True)
class MedianEstimate:
    """A median and its uncertainty, in the unit of the samples.

    ``low`` and ``high`` are the ends of its 95% bootstrap interval, or of the range of fewer than 5
    samples. ``quartiles`` are those of the samples.
    """

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    count: int

    def span(self, form: str = ".2f") -> str:
        """Format ``low`` and ``high`` with the kind of interval; empty for one sample."""
        return f"{self.low:{form}} to {self.high:{form}} ({self.kind})" if self.kind else ""

    @property
    def kind(self) -> str:
        """Name of the interval from ``low`` to ``high``; empty for one sample."""
        if self.count < 2:
            return ""
        return "95%" if self.count >= MIN_SAMPLES else f"range of {self.count}"


def estimate(samples: Sequence[float], seed: int = 0) -> MedianEstimate:
    """Compute the median of at least one sample, with its bootstrap interval or the range."""
    values = np.asarray(samples, dtype=np.float64)
    if len(values) < MIN_SAMPLES:
        low, high = values.min(), values.max()
    else:
        draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
        low, high = np.quantile(np.median(values[draws], axis=1), [0.025, 0.975])
    first, third = np.quantile(values, [0.25, 0.75])
    return MedianEstimate(
        float(np.median(values)), float(low), float(high), (float(first), float(third)), len(values)
    )


def timed(work: Callable[[], object]) -> float:
    """Time ``work`` in seconds; ``work`` itself must wait for the device."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rotated(names: Sequence[str], shift: int) -> list[str]:
    """List names from another first one for every shift, so that no method is always first."""
    start = shift % len(names)
    return [*names[start:], *names[:start]]
