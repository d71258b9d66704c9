"""Probability that the target accepts each draft of a tree.

Siblings exclude each other: a draft is accepted if its parent is, its better siblings are wrong,
and it is right. So the probabilities of siblings add up to at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mlx_redrafter.policy.plans import Floats, checked
from mlx_redrafter.trees.tree import Drafts

# Number of newest observations that the regression is fitted to.
WINDOW = 256
# Number of observations that those of an earlier process count as.
STORED = 64
# Mean and standard deviation of the weights before any observation, see `Calibration`: the
# proposer's probabilities are taken as right until some 20 observations contradict them.
PRIOR = ((0.0, 1.5), (1.0, 0.7), (0.0, 0.5))

_MEAN, _DEVIATION = np.array(PRIOR * 2).T
_PRECISION = np.diag(_DEVIATION**-2)
_SMALLEST = 1e-9  # bound of a probability, which bounds log-odds by 21


# Regressors of one draft: whether a sibling has a higher probability, the log-odds of its
# probability among what its better siblings leave, and its place. The place is the depth below the
# root's children for a first child, and the logarithm of the rank for a later one.
Features = tuple[bool, float, float]


class Calibration:
    """Probability that a draft is right if its parent is and its better siblings are wrong.

    Logistic regression on (1, log-odds, place) over the newest observations. First children and
    later siblings have weights each: what they have in common is little where scores are far off.

    Attributes:
        weights: Weights of first children and of later siblings, shape (6,).
    """

    def __init__(self) -> None:
        self.weights: Floats = _MEAN
        # Weights before any observation, and the inverse of their covariance.
        self._mean, self._precision = _MEAN, _PRECISION
        self._rows: Floats = np.zeros((WINDOW, 7))
        # Number of observations so far, and at the last fit.
        self._count = self._fitted = 0

    def probabilities(self, features: Sequence[Features], parents: Sequence[int]) -> list[float]:
        """Return the probability that each draft is accepted.

        Among siblings it never rises in the proposer's order, and it adds up to at most 1.

        Args:
            features: Features of the drafts.
            parents: Node index of each draft's parent.
        """
        a, b, c, d, e, f = self.weights.tolist()
        # Each node's own probability, the share its children leave, and its last child's share.
        reached, left, last = ([1.0] * (len(parents) + 1) for _ in range(3))
        for i, ((is_later, x, place), parent) in enumerate(zip(features, parents, strict=True)):
            z = d + e * x + f * place if is_later else a + b * x + c * place
            own = min(last[parent], left[parent] * (0.5 + 0.5 * math.tanh(0.5 * z)))
            last[parent] = own
            left[parent] = max(0.0, left[parent] - own)
            reached[i + 1] = reached[parent] * own
        return reached[1:]

    def learn(self, features: Sequence[Features], found: Iterable[tuple[int, bool]]) -> None:
        """Store which drafts the sequence has proved right or wrong, in place of the oldest."""
        for draft, is_right in found:
            is_later, log_odds, place = features[draft]
            known, other = (1.0, log_odds, place), (0.0, 0.0, 0.0)
            inputs = (*other, *known) if is_later else (*known, *other)
            self._rows[self._count % WINDOW] = *inputs, is_right
            self._count += 1

    def fit(self) -> None:
        """Improve the weights, once a thirtieth of what counts is new.

        Newton steps with the largest possible curvature, so that none is too long (Boehning and
        Lindsay, "Monotonicity of quadratic-approximation algorithms", 1988).
        """
        known = min(self._count, WINDOW)
        if self._count - self._fitted <= known // 30:
            return
        self._fitted = self._count
        inputs, right = self._rows[:known, :-1], self._rows[:known, -1]
        inverse = np.linalg.inv(inputs.T @ inputs / 4 + self._precision)
        for _ in range(5):  # two follow log-odds of 14 too slowly
            p = 0.5 + 0.5 * np.tanh(0.5 * (inputs @ self.weights))
            slope = inputs.T @ (right - p) - self._precision @ (self.weights - self._mean)
            self.weights = self.weights + inverse @ slope

    def stored(self) -> dict[str, Any]:
        """Return the weights, and how sure they are, for a file."""
        known = min(self._count, WINDOW)
        inputs = self._rows[:known, :-1]
        p = 0.5 + 0.5 * np.tanh(0.5 * (inputs @ self.weights))
        evidence = self._precision - _PRECISION + inputs.T @ (inputs * (p * (1 - p))[:, None])
        faded = evidence * min(0.5, STORED / max(1, known))
        return {"weights": self.weights.tolist(), "evidence": faded.tolist()}

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> Calibration:
        """Begin with the numbers of a file.

        Raises:
            ValueError: They are damaged.
        """
        found = cls()
        found.weights = found._mean = checked(stored["weights"], _MEAN.shape, -100.0, 100.0)
        evidence = checked(stored["evidence"], _PRECISION.shape, -1e6, 1e6)
        if np.linalg.eigvalsh((evidence + evidence.T) / 2).min() < -1e-6:
            raise ValueError("negative evidence")
        found._precision = _PRECISION + (evidence + evidence.T) / 2
        return found


def features_of(drafts: Drafts) -> list[Features]:
    """Compute the regressors of every draft; siblings come best first."""
    above, found = [0.0, *drafts.scores], []
    rank, left = [0] * len(above), [1.0] * len(above)
    for score, depth, parent in zip(drafts.scores, drafts.depths, drafts.parents, strict=True):
        q = math.exp(min(score - above[parent], 0.0))
        share = q / max(left[parent], q, _SMALLEST)
        share = min(max(share, _SMALLEST), 1 - _SMALLEST)
        is_later = rank[parent] > 0
        place = math.log(rank[parent]) if is_later else depth - 1.0
        found.append((is_later, math.log(share / (1 - share)), place))
        left[parent] -= q
        rank[parent] += 1
    return found
