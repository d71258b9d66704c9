"""Drafts that the target accepts: the probability of each draft of a step, and the number by plan.

Siblings exclude each other: a draft is accepted if its parent is, its better siblings are wrong,
and it is right. So the probabilities of siblings add up to at most 1.

Axes: W widths, L lengths, S sizes, n drafts of a tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.plans import (
    COUNTS,
    FITS,
    LENGTHS,
    PLACES,
    SIZES,
    CurrentCosts,
    Floats,
    checked,
)
from mlx_redrafter.trees.tree import Drafts, TokenTree

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
# Maximum number of drafts per tree that the host scores: as many as a step verifies.
MAX_DRAFTS = SIZES[-1] - 1
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

_NW, _NL, _ = FITS.shape
# Bounds of stored numbers, as in `ExpectedDrafts.chosen`.
_BOUNDS = np.array([[[-1.0]], [[0.01]]]), np.array([[[1.0 * COUNTS[-1]]], [[1e3]]])
_ROWS = np.ogrid[:_NW, :_NL]
# Drafts that a chain of each length verifies, shape (L, 1 + S).
_IN_CHAIN = np.minimum(np.array(LENGTHS)[:, None] - 1, COUNTS)


class Calibration:
    """Probability that a draft is right if its parent is and its better siblings are wrong.

    Logistic regression on (1, log-odds, place) over the newest observations. First children and
    later siblings have weights each: what they have in common is little where scores are far off.
    ``weights`` are those of first children and of later siblings, shape (6,).
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
        ``parents`` has the node index of each draft's parent.
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
        """Begin with the numbers of a file; raise ValueError if they are damaged."""
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


class ScoredDrafts:
    """The best drafts of one step, and the tokens that follow them.

    The host reads the tree on first use, which may wait for the device. ``is_early`` is whether the
    next step to be observed comes before these drafts. ``probabilities`` are those of `score`.
    """

    def __init__(self, plan: DraftPlan, tree: TokenTree, is_early: bool = False):
        self.plan = plan
        self.probabilities: list[float] = []
        self._tree = tree
        self._is_early = is_early
        # Node that the sequence has reached; None once it has left the tree.
        self._node: int | None = 0
        # Tokens of the sequence after that node that `follow` has yet to compare.
        self.following: list[int] = []

    @property
    def is_new(self) -> bool:
        """Whether no token has been compared with the drafts yet."""
        return self._node == 0

    @property
    def is_open(self) -> bool:
        """Whether the next tokens of the sequence may be in the tree."""
        return self._node is not None and not self.following

    def extend(self, tokens: Sequence[int]) -> None:
        """Note the tokens of a step, unless it comes before these drafts."""
        if not self._is_early:
            self.following.extend(tokens)
        self._is_early = False

    def score(self, calibration: Calibration) -> list[float]:
        """Estimate each draft's probability of being accepted."""
        if not self.probabilities:
            self.drafts = self._tree.read().first(MAX_DRAFTS)
            self._features = features_of(self.drafts)
        self.probabilities = calibration.probabilities(self._features, self.drafts.parents)
        return self.probabilities

    def with_others(self) -> tuple[Drafts | None, list[float]]:
        """Merge the drafts, which are scored, with those of another source, if there is one.

        A draft that both have is as probable as the source says that is surer of it. Return all
        drafts, parents before children, or None if there are no others, and their probabilities.
        """
        if self._tree.find_others is None:
            return None, self.probabilities
        drafts, chances = self.drafts, list(self.probabilities)
        found = list(zip(*drafts, strict=True))
        edges = zip(drafts.parents, drafts.tokens, strict=True)
        nodes = {edge: node for node, edge in enumerate(edges, start=1)}
        places = [0]  # node of each of the others' nodes among all
        for score, depth, parent, token in zip(*self._tree.find_others(), strict=True):
            above, chance = places[parent], math.exp(score)
            node = nodes.setdefault((above, token), len(chances) + 1)
            places.append(node)
            if node <= len(chances):
                chances[node - 1] = max(chances[node - 1], chance)
                continue
            found.append((score, depth, above, token))
            chances.append(chance)
        has_others = len(found) > len(drafts.tokens)
        return Drafts(*map(list, zip(*found, strict=True))) if has_others else None, chances

    def follow(self, calibration: Calibration) -> None:
        """Compare the next tokens with the drafts, and learn from every sibling up to the right."""
        found: list[tuple[int, bool]] = []
        drafts, tokens, self.following = self.drafts, self.following, []
        for token in tokens:
            node, self._node = self._node, None
            for draft, parent in enumerate(drafts.parents):
                if parent == node:
                    is_right = drafts.tokens[draft] == token
                    found.append((draft, is_right))
                    if is_right:
                        self._node = draft + 1
                        break
            if self._node is None:
                break
        calibration.learn(self._features, found)


def most_probable(probabilities: Sequence[float]) -> list[int]:
    """Sort the indices of drafts, the most probable first and among equals their parents."""
    return sorted(range(len(probabilities)), key=lambda draft: -probabilities[draft])


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
        """Begin with a file's numbers, for half a window at most; ValueError if damaged."""
        found = cls()
        found.mean = checked(stored["mean"], found.mean.shape, 0.0, LENGTHS[-1])
        found.chosen = checked(stored["chosen"], found.chosen.shape, *_BOUNDS)
        found._count = int(checked(stored["count"], (), 0, 1e6))
        found.fade()
        return found

    def learn(self, scored: ScoredDrafts, costs: CurrentCosts, rate: float) -> None:
        """Learn from the drafts of one tree, which are scored.

        ``rate`` has the tokens per second that the time of a draft yields otherwise.
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

    Return sums in the proposer's order and by probability, shape (2, W, L, 1 + S).
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
