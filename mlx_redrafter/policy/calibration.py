"""How likely a draft is right, given what its proposer says, learnt while decoding.

    log-odds(right | the draft's parent is right) = w . (1, log-odds(q), depth, log(1 + rank))

where q is the proposer's probability of the draft given its parent, depth is 0 for children of the
root, and rank is 0 for the best of siblings: a logistic regression with a normal prior whose mean
believes the proposer, fitted to the newest drafts by Newton's method.

Axes: n observations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlx_redrafter.trees.tree import Drafts

Floats = npt.NDArray[np.float64]

# Mean of the weights before the first draft, and their precision, 1 / standard deviation**2.
PRIOR_MEAN = np.array([0.0, 1.0, 0.0, 0.0])
PRIOR_PRECISION = np.array([1.5, 0.7, 0.2, 1.0]) ** -2
_PRIOR_CURVATURE = np.diag(PRIOR_PRECISION)
# Observations that count, and steps of Newton's method from the weights before.
WINDOW, NEWTON_STEPS = 512, 2
# Observations after which the weights are fitted again, and until when they are after every one.
FIT_EVERY, FIT_AT_FIRST = 8, 64
# Constant, log-odds, depth and logarithm of the rank of a draft.
Features = tuple[float, float, float, float]
# Bounds on log-odds, and on probabilities.
MOST_LOG_ODDS, LEAST_CHANCE = 20.0, 1e-12


class Calibration:
    """A logistic regression on the newest observations."""

    def __init__(self, before: Calibration | None = None) -> None:
        self._features: Floats = np.zeros((WINDOW, 4))
        self._right: Floats = np.zeros(WINDOW)
        self._count = 0
        self._weights: Floats = PRIOR_MEAN.copy()
        self._num_new = 0
        if before is not None:
            self._features, self._right = before._features.copy(), before._right.copy()
            self._count, self._weights = before._count, before._weights.copy()

    def probabilities(self, features: Sequence[Features]) -> list[float]:
        """Probability of each of n drafts that it is right if its parent is."""
        # Not by NumPy, which takes longer for so few.
        constant, slope, by_depth, by_rank = self._weights.tolist()
        return [
            0.5 + 0.5 * math.tanh(0.5 * (constant + slope * x + by_depth * depth + by_rank * rank))
            for _, x, depth, rank in features
        ]

    def add(self, features: Sequence[Features], found: Sequence[tuple[int, bool]]) -> None:
        """Take in drafts whose parents were right.

        Args:
            features: `draft_features` of a tree.
            found: Indices of drafts, and whether these were right.
        """
        for draft, is_right in found:
            place = self._count % WINDOW
            self._features[place], self._right[place] = features[draft], is_right
            self._count += 1
            self._num_new += 1

    def fit(self) -> None:
        """Fit the weights to what was taken in, at first whenever there is something new."""
        if self._num_new >= (1 if self._count < FIT_AT_FIRST else FIT_EVERY):
            self._num_new = 0
            for _ in range(NEWTON_STEPS):
                self._improve()

    def _improve(self) -> None:
        """A step of Newton's method."""
        known = min(self._count, WINDOW)
        features, right = self._features[:known], self._right[:known]
        chances = _sigmoid(features @ self._weights)
        slope = features.T @ (right - chances) - PRIOR_PRECISION * (self._weights - PRIOR_MEAN)
        curvature = (features.T * (chances * (1 - chances) + 1e-4)) @ features
        step = np.linalg.solve(curvature + _PRIOR_CURVATURE, slope)
        self._weights += step / max(1.0, float(np.abs(step).max()))


def draft_features(drafts: Drafts) -> list[Features]:
    """What the probabilities of n drafts depend on."""
    above, rows = [0.0, *drafts.scores], []
    # Siblings come best first: how many of each node's children came before.
    ranks = [0] * len(above)
    for score, depth, parent in zip(drafts.scores, drafts.depths, drafts.parents, strict=True):
        chance = math.exp(min(score - above[parent], 0.0))
        chance = min(max(chance, LEAST_CHANCE), 1 - LEAST_CHANCE)
        log_odds = math.log(chance / (1 - chance))
        log_odds = min(max(log_odds, -MOST_LOG_ODDS), MOST_LOG_ODDS)
        rows.append((1.0, log_odds, depth - 1.0, math.log1p(ranks[parent])))
        ranks[parent] += 1
    return rows


def _sigmoid(x: Floats) -> Floats:
    return 0.5 + 0.5 * np.tanh(0.5 * x)  # which does not overflow
