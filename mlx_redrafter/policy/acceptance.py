"""Probability that the target accepts each draft of a tree.

Siblings exclude each other: a draft is accepted if its parent is, its better siblings are wrong,
and it is right. So the probabilities of siblings add up to at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.trees.tree import Drafts, TokenTree

Floats = npt.NDArray[np.float64]

# Number of newest observations that each regression is fitted to.
WINDOW = 256
# Mean and standard deviation of the weights before any observation, see `Regression`: the
# proposer's probabilities are taken as right until some 20 observations contradict them.
PRIOR = ((0.0, 1.5), (1.0, 0.7), (0.0, 0.5))
# Maximum number of drafts per tree that the host scores; more cost it up to a millisecond.
MAX_DRAFTS = 48

_MEAN, _DEVIATION = np.array(PRIOR).T
_PRECISION = _DEVIATION**-2
_SMALLEST = 1e-9  # bound of a probability, which bounds log-odds by 21


class Features(NamedTuple):
    """Regressors of one draft.

    Attributes:
        has_better_sibling: Whether the proposer gives a sibling a higher probability.
        log_odds: Log-odds of its probability among what its better siblings leave.
        place: Depth below the root's children, or logarithm of the rank for later siblings.
    """

    has_better_sibling: bool
    log_odds: float
    place: float


class Regression:
    """Logistic regression on (1, log-odds, place) over the newest observations.

    Higher scores never make a draft less likely, so the weight of the log-odds is at least 0.

    Args:
        before: Regression of the previous sequence.
        max_place: Upper bound of the weight of the place.
    """

    def __init__(self, before: Regression | None = None, max_place: float = math.inf):
        self.weights: Floats = np.array([mean for mean, _ in PRIOR])
        self._rows: Floats = np.zeros((WINDOW, 4))
        # Number of observations so far, and at the last fit.
        self._count = self._fitted = 0
        if before is not None:
            self.weights, self._rows = before.weights, before._rows.copy()
            self._count = self._fitted = before._count
        self._low = np.array([-math.inf, 0.0, -math.inf])
        self._high = np.array([math.inf, math.inf, max_place])

    def add(self, log_odds: float, place: float, is_right: bool) -> None:
        """Store an observation in place of the oldest one."""
        self._rows[self._count % WINDOW] = 1.0, log_odds, place, is_right
        self._count += 1

    def fit(self) -> None:
        """Improve the weights by one Newton step if there are new observations."""
        if self._count == self._fitted:
            return
        self._fitted = self._count
        rows = self._rows[: self._count]
        inputs, right = rows[:, :3], rows[:, 3]
        p = 0.5 + 0.5 * np.tanh(0.5 * (inputs @ self.weights))
        slope = inputs.T @ (right - p) - _PRECISION * (self.weights - _MEAN)
        curve = (inputs.T * (p * (1 - p) + 1e-4)) @ inputs + np.diag(_PRECISION)
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

    Args:
        before: Acceptance of the previous sequence.
    """

    def __init__(self, before: Acceptance | None = None):
        self.first: Regression = Regression(None if before is None else before.first)
        self.later: Regression = Regression(None if before is None else before.later, max_place=0.0)

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
        """Store which drafts the text has proved right or wrong."""
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
        found.append(Features(is_later, math.log(share / (1 - share)), place))
        left[parent] -= q
        rank[parent] += 1
    return found


class ScoredDrafts:
    """The best drafts of one step, and the text that follows them.

    Args:
        plan: Plan of the drafts.
        tree: The drafts; the host reads them on first use, which may wait for the device.

    Attributes:
        plan: Plan of the drafts.
        node: Node that the text has reached; None once the text has left the tree.
        right: Drafts that the text has proved right.
        probabilities: The newest result of `score`.
    """

    def __init__(self, plan: DraftPlan, tree: TokenTree):
        self.plan = plan
        self.node: int | None = 0
        self.right: set[int] = set()
        self.probabilities: list[float] = []
        self._tree: TokenTree | None = tree
        self._drafts: Drafts
        self._features: list[Features]

    @property
    def drafts(self) -> Drafts:
        """The drafts."""
        if self._tree is not None:
            self._drafts = self._tree.read().first(MAX_DRAFTS)
            self._features, self._tree = features_of(self._drafts), None
        return self._drafts

    def score(self, acceptance: Acceptance) -> list[float]:
        """Estimate each draft's probability of being accepted."""
        parents = self.drafts.parents
        self.probabilities = acceptance.probabilities(self._features, parents)
        return self.probabilities

    def follow(self, tokens: Iterable[int], acceptance: Acceptance) -> None:
        """Compare the next tokens of the text with the drafts, and learn from every sibling."""
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
    """Indices of drafts, the most probable first and among equals their parents."""
    return sorted(range(len(probabilities)), key=lambda draft: -probabilities[draft])


def cumulative(values: Iterable[float]) -> list[float]:
    """Sums of the first 0, 1, 2, ... values."""
    return list(accumulate(values, initial=0.0))
