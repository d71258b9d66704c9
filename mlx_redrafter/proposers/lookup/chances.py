"""Chances that drafts of a lookup are right, learned from the text as it goes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import exp, log1p
from typing import NamedTuple

# Shortest match of each group whose chances are counted together, in tokens.
MATCHES = (1, 2, 3, 4, 6, 8, 12, 20, 32)
# Number of tokens of the longest context with candidates.
ORDERS = 3
# Lower bounds of all groups of shares but the last, as log-odds.
LOG_ODDS = tuple(4 - step / 1.5 for step in range(15))
# Window of the running means, in drafts.
MEMORY = 64
# Weight of a chance before its first draft, in drafts.
PRIOR = 4

# Upper bounds of the negative logarithms of shares in those groups.
_BOUNDS = tuple(log1p(exp(-odds)) for odds in LOG_ODDS)
_NUM_GROUPS = 1 + len(LOG_ODDS)
# Group of matches by length, up to the longest bound.
_MATCH_GROUPS = [sum(least <= length for least in MATCHES) for length in range(MATCHES[-1] + 1)]


class Child(NamedTuple):
    """A token that may follow a node.

    Attributes:
        chance: Probability that it does, given that the node is right.
        token: Token id.
        feature: Number of `feature_of`, on which its chance depends.
    """

    chance: float
    token: int
    feature: int


def group_of_match(length: int) -> int:
    """Return the group of a match of ``length`` tokens, from 1; 0 for none."""
    return _MATCH_GROUPS[min(length, MATCHES[-1])]


def group_of_share(log_share: float) -> int:
    """Return the group of a probability, 0 for the largest, given its natural logarithm."""
    return bisect_left(_BOUNDS, -log_share)


def feature_of(match: int, order: int, group: int, has_noise: bool) -> int:
    """Number what a draft's chance depends on.

    Args:
        match: Group of the match before its earlier occurrence; 0 for none.
        order: Tokens of the context after which it was a candidate; 0 if it was none.
        group: Group of its share among candidates, or if it was none, rank among occurrences.
        has_noise: Whether the target's noise was part of that share.
    """
    return ((match * 2 + has_noise) * (ORDERS + 1) + order) * _NUM_GROUPS + group


class Chances:
    """Rates at which drafts were right, by feature.

    It holds no text. Texts may share it, and threads: a lost update is one draft.

    Attributes:
        rates: Chance of a draft whose parent is right, by feature.
    """

    def __init__(self) -> None:
        groups, noises = range(_NUM_GROUPS), (False, True)
        self.rates = [
            _prior(match, order, group)
            for match in range(len(MATCHES) + 1)
            for _ in noises
            for order in range(ORDERS + 1)
            for group in groups
        ]
        self._counts = [PRIOR] * len(self.rates)

    def learn(self, children: Sequence[Child], token: int) -> None:
        """Count which child of a node that was right is the token that came."""
        rates, counts = self.rates, self._counts
        for _, draft, feature in children:
            count = counts[feature] = min(counts[feature] + 1, MEMORY)
            rates[feature] += ((draft == token) - rates[feature]) / count

    def stored(self) -> dict[str, list[float]]:
        """Return the rates that drafts have shown and their counts, by feature, for a file."""
        found = zip(self.rates.copy(), self._counts.copy(), strict=True)
        return {str(i): [round(r, 4), n] for i, (r, n) in enumerate(found) if n > PRIOR}

    def restore(self, stored: Mapping[str, Sequence[float]]) -> None:
        """Begin with the numbers of a file, at half their weight.

        Raises:
            ValueError: They are damaged, and nothing has changed; TypeError or AttributeError, too.
        """
        rates, counts = self.rates.copy(), self._counts.copy()
        for feature, (rate, count) in stored.items():
            if not 0 <= rate <= 1 or int(feature) not in range(len(rates)):
                raise ValueError(f"{rate} is no rate of {feature}")
            rates[int(feature)] = float(rate)
            counts[int(feature)] = min(MEMORY, max(PRIOR, int(count) // 2))
        self.rates, self._counts = rates, counts


def _prior(match: int, order: int, group: int) -> float:
    """Return a chance before any draft is counted."""
    odds = LOG_ODDS[min(group, len(LOG_ODDS) - 1)]
    candidate = (0.5 + 0.1 * order) / (1 + exp(-odds)) if order else 0.0
    repeated = 0.2 + 0.07 * match if match else 0.0
    if not order:
        return repeated / (1 + group)
    return max(candidate, min(repeated, 0.9))
