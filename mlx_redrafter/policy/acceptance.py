"""Probability that the target accepts each draft of a tree.

Siblings exclude each other: a draft is accepted if its parent is, its better siblings are wrong,
and it is right. So the probabilities of siblings add up to at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.plans import SIZES
from mlx_redrafter.trees.tree import Drafts, TokenTree

Floats = npt.NDArray[np.float64]

# Number of newest observations that each regression is fitted to.
WINDOW = 256
# Mean and standard deviation of the weights before any observation, see `Regression`: the
# proposer's probabilities are taken as right until some 20 observations contradict them.
PRIOR = ((0.0, 1.5), (1.0, 0.7), (0.0, 0.5))

# Maximum number of drafts per tree that the host scores: as many as a step verifies.
MAX_DRAFTS = SIZES[-1] - 1

_MEAN, _DEVIATION = np.array(PRIOR).T
_PRECISION = np.diag(_DEVIATION**-2)
_SMALLEST = 1e-9  # bound of a probability, which bounds log-odds by 21


# Regressors of one draft: whether a sibling has a higher probability, the log-odds of its
# probability among what its better siblings leave, and its place. The place is the depth below the
# root's children for a first child, and the logarithm of the rank for a later one.
Features = tuple[bool, float, float]


class Regression:
    """Logistic regression on (1, log-odds, place) over the newest observations.

    Higher scores never make a draft less likely, so the weight of the log-odds is at least 0.

    Args:
        max_place: Upper bound of the weight of the place.
    """

    def __init__(self, max_place: float = math.inf):
        self.weights: Floats = _MEAN
        self._rows: Floats = np.zeros((WINDOW, 4))
        # Number of observations so far, and at the last fit.
        self._count = self._fitted = 0
        self._low = np.array([-math.inf, 0.0, -math.inf])
        self._high = np.array([math.inf, math.inf, max_place])

    def add(self, log_odds: float, place: float, is_right: bool) -> None:
        """Store an observation in place of the oldest one."""
        self._rows[self._count % WINDOW] = 1.0, log_odds, place, is_right
        self._count += 1

    def fit(self) -> None:
        """Improve the weights by one Newton step, once a thirtieth of what counts is new."""
        known = min(self._count, WINDOW)
        if self._count - self._fitted <= known // 30:
            return
        self._fitted = self._count
        rows = self._rows[:known]
        inputs, right = rows[:, :3], rows[:, 3]
        p = 0.5 + 0.5 * np.tanh(0.5 * (inputs @ self.weights))
        slope = inputs.T @ (right - p) - _PRECISION @ (self.weights - _MEAN)
        curve = (inputs.T * (p * (1 - p) + 1e-4)) @ inputs + _PRECISION
        wanted = np.linalg.solve(curve, slope)
        step = np.clip(wanted, self._low - self.weights, self._high - self.weights)
        free = step == wanted
        if not free.all():  # the other weights make up for one that is held at its bound
            rest = slope[free] - curve[free][:, ~free] @ step[~free]
            step[free] = np.linalg.solve(curve[free][:, free], rest)
        self.weights = self.weights + step / max(1.0, float(np.abs(step).max()))


class Acceptance:
    """Probability that a draft is right if its parent is and its better siblings are wrong.

    First children and later siblings have a regression each: what they have in common is little
    where scores are far off. Later siblings do not get likelier with their rank.
    """

    def __init__(self) -> None:
        self.first = Regression()
        self.later = Regression(max_place=0.0)

    def probabilities(self, features: Sequence[Features], parents: Sequence[int]) -> list[float]:
        """Return the probability that each draft is accepted.

        Among siblings it never rises in the proposer's order, and it adds up to at most 1.

        Args:
            features: Features of the drafts.
            parents: Node index of each draft's parent.
        """
        (a, b, c), (d, e, f) = self.first.weights.tolist(), self.later.weights.tolist()
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
        """Store which drafts the sequence has proved right or wrong."""
        for draft, is_right in found:
            is_later, log_odds, place = features[draft]
            (self.later if is_later else self.first).add(log_odds, place, is_right)

    def fit(self) -> None:
        """Fit both regressions."""
        self.first.fit()
        self.later.fit()


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


class ScoredDrafts:
    """The best drafts of one step, and the tokens that follow them.

    Args:
        plan: Plan of the drafts.
        tree: The drafts; the host reads them on first use, which may wait for the device.

    Attributes:
        plan: Plan of the drafts.
        node: Node that the sequence has reached; None once it has left the tree.
        right: Drafts that the sequence has proved right.
        probabilities: The newest result of `score`; empty before.
    """

    def __init__(self, plan: DraftPlan, tree: TokenTree):
        self.plan = plan
        self.node: int | None = 0
        self.right: set[int] = set()
        self.probabilities: list[float] = []
        self._tree = tree

    def score(self, acceptance: Acceptance) -> list[float]:
        """Estimate each draft's probability of being accepted."""
        if not self.probabilities:
            self.drafts = self._tree.read().first(MAX_DRAFTS)
            self._features = features_of(self.drafts)
        self.probabilities = acceptance.probabilities(self._features, self.drafts.parents)
        return self.probabilities

    def follow(self, tokens: Iterable[int], acceptance: Acceptance) -> None:
        """Compare the next tokens with the drafts, and learn from every sibling up to the right."""
        found: list[tuple[int, bool]] = []
        drafts = self.drafts
        for token in tokens:
            node, self.node = self.node, None
            for draft, parent in enumerate(drafts.parents):
                if parent == node:
                    is_right = drafts.tokens[draft] == token
                    found.append((draft, is_right))
                    if is_right:
                        self.right.add(draft)
                        self.node = draft + 1
                        break
            if self.node is None:
                break
        acceptance.learn(self._features, found)


def most_probable(probabilities: Sequence[float]) -> list[int]:
    """Sort the indices of drafts, the most probable first and among equals their parents."""
    return sorted(range(len(probabilities)), key=lambda draft: -probabilities[draft])
