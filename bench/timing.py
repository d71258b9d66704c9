"""Interleaved timing, and medians of the samples with their uncertainty.

Machines get hot and are shared: samples to compare are measured in turns, and compared in pairs.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OnProgress = Callable[[int, int], None]

# Bootstrap resamples; more no longer move the ends of the interval visibly.
RESAMPLES = 10_000
# Minimum number of texts for a bootstrap interval; of fewer, the range is as informative.
MIN_TEXTS = 5


@dataclass(frozen=True)
class MedianEstimate:
    """A median and its uncertainty, in the unit of the samples.

    ``low`` and ``high`` are the ends of its 95% bootstrap interval, or of the range of the samples
    of fewer than 5 texts. ``quartiles`` are those of the samples.
    """

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    count: int
    num_texts: int

    def span(self) -> str:
        """Format ``low`` and ``high`` with the kind of interval; empty for one sample."""
        kind = "95%" if self.num_texts >= MIN_TEXTS else f"range of {self.count}"
        return "" if self.count < 2 else f"{self.low:.2f} to {self.high:.2f} ({kind})"


def estimate(samples: Sequence[float], texts: Sequence[Hashable] | None = None) -> MedianEstimate:
    """Compute the median of at least one sample, with its bootstrap interval or the range.

    ``texts`` names the text of each sample; by default every sample has its own. Repeats of a text
    are alike, so a resample draws texts, each with all its repeats.
    """
    values = np.asarray(samples, dtype=np.float64)
    by_text: dict[Hashable, list[float]] = {}
    for text, value in zip(range(len(values)) if texts is None else texts, values, strict=True):
        by_text.setdefault(text, []).append(value)
    if len(by_text) < MIN_TEXTS:
        low, high = values.min(), values.max()
    else:
        low, high = np.quantile(_resample(list(by_text.values())), [0.025, 0.975])
    first, third = np.quantile(values, [0.25, 0.75])
    quartiles = float(first), float(third)
    median, count = float(np.median(values)), len(values)
    return MedianEstimate(median, float(low), float(high), quartiles, count, len(by_text))


def _resample(by_text: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Compute the medians of resamples of texts, each with the samples of one text."""
    table = np.full((len(by_text), max(map(len, by_text))), np.nan)
    for row, samples in zip(table, by_text, strict=True):
        row[: len(samples)] = samples
    draws = np.random.default_rng(0).integers(len(table), size=(RESAMPLES, len(table)))
    drawn = table[draws].reshape(RESAMPLES, -1)
    # Texts with fewer samples than others leave NaN; the plain median is faster.
    median = np.nanmedian if np.isnan(table).any() else np.median
    return np.asarray(median(drawn, axis=1))


def rotated(names: Sequence[str], shift: int) -> list[str]:
    """List names from another first one for every shift, so that no method is always first."""
    start = shift % len(names)
    return [*names[start:], *names[:start]]
