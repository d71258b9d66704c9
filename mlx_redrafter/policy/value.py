"""Expected number of accepted drafts of every plan.

Axes: W widths, L lengths, S sizes, n drafts of a tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlx_redrafter.policy.plans import COUNTS, FITS, LENGTHS, PLACES, Floats, checked
from mlx_redrafter.policy.scored_drafts import ScoredDrafts, most_probable
from mlx_redrafter.policy.step_times import CurrentCosts

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

_NW, _NL, _NC = FITS.shape
# Bounds of stored numbers, as in `ExpectedDrafts.chosen`.
_BOUNDS = np.array([[[-1.0]], [[0.01]]]), np.array([[[1.0 * COUNTS[-1]]], [[1e3]]])
_ROWS = np.ogrid[:_NW, :_NL]
# Drafts that a chain of each length verifies, shape (L, 1 + S).
_IN_CHAIN = np.minimum(np.array(LENGTHS)[:, None] - 1, COUNTS)


class ExpectedDrafts:
    """Running mean of the accepted drafts that every plan would have had.

    Each tree shows that for the plans within its shape; ratios to the means extrapolate to others.

    Attributes:
        mean: Accepted drafts by plan and size, in the proposer's order, shape (W, L, 1 + S).
        chosen: If the policy verifies as many as pay: accepted drafts, and the cost of the step as
            a multiple of that of verifying one draft, shape (2, W, L).
    """

    def __init__(self) -> None:
        chain = PRIOR_CHAIN * (1 - PRIOR_CHAIN**_IN_CHAIN) / (1 - PRIOR_CHAIN)
        self.mean: Floats = np.array([chain, *[PRIOR_TREE * chain] * (_NW - 1)])
        self.chosen: Floats = np.stack([np.full((_NW, _NL), -1.0), np.ones((_NW, _NL))])
        # Number of trees that the means are over, and of those seen, at most as many.
        self._window, self._count = MEMORY, 0

    def average_over(self, num_trees: int) -> None:
        """Let the means be over that many trees, such as MEMORY of each sequence of a batch."""
        self._window = num_trees

    def fade(self) -> None:
        """Let the means count as half of a full window."""
        self._count = min(self._count, self._window // 2)

    def stored(self) -> dict[str, Any]:
        """Return the means, for a file."""
        return {
            "mean": self.mean.clip(0.0, LENGTHS[-1]).round(4).tolist(),
            "chosen": np.clip(self.chosen, *_BOUNDS).round(4).tolist(),
            "count": self._count,
        }

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> ExpectedDrafts:
        """Begin with the numbers of a file, which count as half of a full window at most.

        Raises:
            ValueError: They are damaged.
        """
        found = cls()
        found.mean = checked(stored["mean"], found.mean.shape, 0.0, LENGTHS[-1])
        found.chosen = checked(stored["chosen"], found.chosen.shape, *_BOUNDS)
        found._count = int(checked(stored["count"], (), 0, 1e6))
        found.fade()
        return found

    def learn(self, scored: ScoredDrafts, costs: CurrentCosts, rate: float) -> None:
        """Learn from the drafts of one tree.

        Args:
            scored: The drafts, which have been scored.
            costs: Current costs of steps.
            rate: Tokens per second that the time of a draft yields otherwise.
        """
        mean, drafts = self._extrapolate(_within(scored), PLACES[scored.plan.shape])
        self._count = min(self._count + 1, self._window)
        self.mean = self.mean + (mean - self.mean) / self._count
        best = *_ROWS, (drafts - rate * costs.waiting).argmax(-1)
        newest = np.array([drafts[best], costs.waiting[best] / costs.waiting[..., 1]])
        self.chosen = self.chosen + (newest - self.chosen) / self._count

    def _extrapolate(self, found: Floats, place: tuple[int, int]) -> Floats:
        """Fill in the plans that are longer or wider than the one at ``place``."""
        (w, n), mean = place, self.mean
        if n + 1 < _NL:
            # Drafts that a chain's last level adds in this tree, the level before, and the mean.
            chain = [0.0, *found[0, 0, : n + 1, -1]]
            last, before = chain[-1] - chain[-2], chain[-2] - chain[-3] if n else 1.0
            usual = mean[0, n, -1] - (mean[0, n - 1, -1] if n else 0.0)
            # Further levels add their mean, scaled by the last level, and a part of what they would
            # add if they were as likely as it was: a mean that no tree has shown lately is doubted.
            further = mean[:, n + 1 :] - mean[:, n : n + 1]
            scale = (1 - DOUBT) * (SMALL + last) / (SMALL + max(0.0, usual))
            added = last * min(1.0, last / (SMALL + before)) * (np.array(COUNTS) >= LENGTHS[n])
            found[:, :, n + 1 :] = found[:, :, n : n + 1] + scale * further + DOUBT * added
        for wider in range(w + 1, _NW):
            found[:, wider] = found[:, w] * (SMALL + mean[wider]) / (SMALL + mean[w])
        return found


def _within(scored: ScoredDrafts) -> Floats:
    """Sum the probabilities of the drafts that each plan within a tree's shape verifies.

    Returns:
        Sums in the proposer's order and by probability, shape (2, W, L, 1 + S).
    """
    (w, n), drafts = PLACES[scored.plan.shape], scored.drafts
    found = np.zeros((2, *FITS.shape))
    # A search of one beam finds the first children from the root on.
    chain, node = [0.0] * LENGTHS[-1], 0
    for draft, parent in enumerate(drafts.parents):
        if parent == node:
            depth, node = drafts.depths[draft], draft + 1
            chain[depth:] = [chain[depth - 1] + scored.probabilities[draft]] * (len(chain) - depth)
    found[:, : w + 1, : n + 1] = np.array(chain)[_IN_CHAIN[: n + 1]]
    if w:
        found[0, w, : n + 1] = _sums(scored, range(len(drafts.tokens)), n)
        found[1, w, : n + 1] = _sums(scored, most_probable(scored.probabilities), n)
    return found


def _sums(scored: ScoredDrafts, order: Sequence[int], longest: int) -> Floats:
    """Sum over the first drafts in an order, for each length up to a place and each count."""
    places = np.array(order)
    depths = np.array(scored.drafts.depths)[places]
    inside = depths < np.array(LENGTHS[: longest + 1])[:, None]
    sums = np.zeros((longest + 1, len(order) + 1))
    rows = np.arange(longest + 1)[:, None]
    sums[rows, inside.cumsum(-1)] = (inside * np.array(scored.probabilities)[places]).cumsum(-1)
    np.maximum.accumulate(sums, axis=-1, out=sums)
    return sums[:, np.minimum(COUNTS, len(places))]
