"""Expected number of accepted drafts of every plan.

Axes: W widths, L lengths, S sizes, K ways to choose the nodes: 0 in the proposer's order, 1 by
probability of being accepted, n drafts of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.policy.acceptance import MAX_DRAFTS, ScoredDrafts, most_probable
from mlx_redrafter.policy.plans import COUNTS, FITS, LENGTHS, PLACES
from mlx_redrafter.policy.step_times import CurrentCosts
from mlx_redrafter.trees.tree import Drafts

Floats = npt.NDArray[np.float64]

# Window of the running means, in trees: twice as many follow a changing text too slowly.
MEMORY = 10
# Probability that the next draft of a chain is right if its parent is, before the first drafts.
PRIOR_CHAIN = 0.75
# Expected drafts of a tree, as a multiple of a chain's of the same length, before the first tree.
PRIOR_TREE = 1.15
# Drafts added on both sides of a ratio that extrapolates: the ratio of two small means is noise.
SMALL = 0.05
# Weight of a further level's likeness to the last one seen, beside its own mean.
DOUBT = 0.2
# Window of the counts that correct expectations, in trees.
COUNTED = 100

_NW, _NL, _NS = FITS.shape[0], FITS.shape[1], FITS.shape[2] - 1
# Index in SIZES of the smallest size that verifies the i-th draft in order.
BUCKETS = np.searchsorted(COUNTS[1:], np.arange(1, MAX_DRAFTS + 1)).clip(max=_NS - 1)


class Correction:
    """Accepted drafts as a share of the expected ones, by place in the order of verification.

    The share differs from 1 as far as the counts contradict the expectation by two standard
    deviations. Trees that were not verified count as well.

    Args:
        before: Correction of the previous sequence, of which half counts.
    """

    def __init__(self, before: Correction | None = None):
        self._expected: Floats = np.zeros((2, _NS)) if before is None else before._expected / 2
        self._accepted: Floats = np.zeros((2, _NS)) if before is None else before._accepted / 2
        self.share: Floats = np.ones((2, _NS))
        self._update()

    def learn(self, probabilities: Sequence[float], right: set[int]) -> None:
        """Count the drafts of one tree, whose text is known.

        Args:
            probabilities: Probability of each draft that it is accepted.
            right: Drafts that were right.
        """
        values = np.array([probabilities, [i in right for i in range(len(probabilities))]])
        order = most_probable(probabilities)
        for kind, column in enumerate((values, values[:, order])):
            expected, accepted = column[:, : COUNTS[-1]]
            places = BUCKETS[: len(expected)]
            self._expected[kind] += np.bincount(places, expected, _NS)
            self._accepted[kind] += np.bincount(places, accepted, _NS)
        self._expected *= 1 - 1 / COUNTED
        self._accepted *= 1 - 1 / COUNTED
        self._update()

    def _update(self) -> None:
        expected, accepted = np.maximum(self._expected, 1e-9), self._accepted
        low = np.maximum(0.0, accepted - 2 * np.sqrt(accepted)) / expected
        high = (accepted + 2 * np.sqrt(accepted + 1)) / expected
        self.share = np.clip(1.0, low, high)

    def apply(self, drafts: Floats) -> Floats:
        """Correct sums of expected drafts by size, shape (..., 1 + S) with K first or no K."""
        share = self.share.reshape(2, *[1] * (drafts.ndim - 2), _NS)
        steps = np.diff(drafts, axis=-1) * share
        return np.concatenate([np.zeros_like(drafts[..., :1]), steps.cumsum(-1)], axis=-1)


class LookupCorrection:
    """Accepted drafts of prompt lookup as a share of those it expects.

    A lookup that is used is one that promises much, so fewer are accepted than expected.

    Args:
        before: Correction of the previous sequence, of which half counts.
    """

    # Lookups that count, and expected drafts that are believed before the first one.
    WINDOW = 16
    BELIEVED = 4.0

    def __init__(self, before: LookupCorrection | None = None):
        self._expected: float = 0.0 if before is None else before._expected / 2
        self._accepted: float = 0.0 if before is None else before._accepted / 2

    @property
    def share(self) -> float:
        """The share to expect of the next lookup."""
        return (self.BELIEVED + self._accepted) / (self.BELIEVED + self._expected)

    def learn(self, expected: float, accepted: int) -> None:
        """Count a lookup that was verified."""
        self.forget()
        self._expected += expected
        self._accepted += accepted

    def forget(self) -> None:
        """Let old counts fade, also with lookups that are not used: the text has moved on."""
        self._expected *= 1 - 1 / self.WINDOW
        self._accepted *= 1 - 1 / self.WINDOW


class ExpectedDrafts:
    """Running mean of the accepted drafts that every plan would have had.

    Each tree shows that for the plans within its shape; ratios to the means extrapolate to others.

    Args:
        before: Means of the previous sequence, which count as half of a full window.
        window: Number of trees that the means are over.

    Attributes:
        mean: Accepted drafts by way to choose nodes, plan and size, shape (K, W, L, 1 + S).
        chosen: If the policy verifies as many as pay: accepted drafts, and the cost of the step
            as a multiple of `CurrentCosts.fewest`, shape (2, W, L).
    """

    def __init__(self, before: ExpectedDrafts | None = None, window: int = MEMORY):
        count = np.minimum(np.array(LENGTHS)[:, None] - 1, COUNTS)
        chain = PRIOR_CHAIN * (1 - PRIOR_CHAIN**count) / (1 - PRIOR_CHAIN)
        widths = [chain, *[PRIOR_TREE * chain] * (_NW - 1)]
        self.mean: Floats = np.array([widths] * 2)
        self.chosen: Floats = np.stack([np.full((_NW, _NL), -1.0), np.ones((_NW, _NL))])
        self._window = window
        self._count = 0
        if before is not None:
            self.mean, self.chosen = before.mean, before.chosen
            self._count = min(before._count, window // 2)

    def learn(
        self, scored: ScoredDrafts, correction: Correction, costs: CurrentCosts, rate: float
    ) -> None:
        """Learn from the drafts of one tree.

        Args:
            scored: The drafts, which have been scored.
            correction: Correction of the probabilities.
            costs: Current costs of steps.
            rate: Tokens per second that the time of a draft yields otherwise.
        """
        found = self._extrapolate(_within(scored), scored.plan.shape)
        self._count = min(self._count + 1, self._window)
        self.mean = self.mean + (found - self.mean) / self._count
        drafts = correction.apply(found)[1]
        best = (drafts - rate * costs.waiting).argmax(-1)[..., None]
        relative = np.take_along_axis(costs.waiting, best, -1)[..., 0] / costs.fewest
        relative = np.where(costs.offered, relative, 1.0)  # other plans have no cost
        newest = np.array([np.take_along_axis(drafts, best, -1)[..., 0], relative])
        self.chosen = self.chosen + (newest - self.chosen) / self._count

    def _extrapolate(self, found: Floats, shape: DraftShape) -> Floats:
        """Fill in longer and wider plans than ``shape``."""
        (w, n), mean = PLACES[shape], self.mean
        if n + 1 < _NL:
            # Drafts that a chain's last level adds in this tree, the level before, and the mean.
            *_, before, last = 1.0, *np.diff(found[0, 0, : n + 1, -1], prepend=0.0)
            usual = np.diff(mean[0, 0, : n + 1, -1], prepend=0.0)[-1]
            # Further levels add their mean, scaled by the last level, and a part of what they would
            # add if they were as likely as it was: a mean that no tree has shown lately is doubted.
            further = mean[:, :, n + 1 :] - mean[:, :, n : n + 1]
            scale = (SMALL + last) / (SMALL + max(0.0, usual))
            added = last * min(1.0, last / (SMALL + before)) * (np.array(COUNTS) >= LENGTHS[n])
            found[:, :, n + 1 :] = (
                found[:, :, n : n + 1] + (1 - DOUBT) * scale * further + DOUBT * added
            )
        for wider in range(w + 1, _NW):
            ratio = (SMALL + mean[:, wider]) / (SMALL + mean[:, w])
            found[:, wider] = found[:, w] * ratio
        return found


def _within(scored: ScoredDrafts) -> Floats:
    """Sums of probabilities of the drafts that each plan within a tree's shape verifies."""
    (w, n), drafts = PLACES[scored.plan.shape], scored.drafts
    probabilities, depths = np.array(scored.probabilities), np.array(drafts.depths)
    found = np.zeros((2, _NW, _NL, _NS + 1))
    chain = _sums(probabilities, depths, _chain(drafts), n)
    found[:, : w + 1, : n + 1] = chain
    if w:
        found[0, w, : n + 1] = _sums(probabilities, depths, range(len(depths)), n)
        by_probability = most_probable(scored.probabilities)
        found[1, w, : n + 1] = _sums(probabilities, depths, by_probability, n)
    return found


def _chain(drafts: Drafts) -> list[int]:
    """Return the drafts of a search of one beam: first children from the root on."""
    chain, node = [], 0
    for draft, parent in enumerate(drafts.parents):
        if parent == node:
            chain.append(draft)
            node = draft + 1
    return chain


def _sums(probabilities: Floats, depths: Floats, order: Sequence[int], longest: int) -> Floats:
    """Sums over the first drafts in an order, for each length up to a place and each count."""
    places = np.array(order, dtype=np.int64)
    inside = depths[places] < np.array(LENGTHS[: longest + 1])[:, None]
    sums = np.zeros((longest + 1, len(order) + 1))
    rows = np.arange(longest + 1)[:, None]
    sums[rows, inside.cumsum(axis=-1)] = (inside * probabilities[places]).cumsum(axis=-1)
    sums = np.maximum.accumulate(sums, axis=-1)
    found: Floats = sums[:, np.minimum(COUNTS, len(places))]
    return found
