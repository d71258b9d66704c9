"""Chances that drafts of a lookup are right, learned from the text as it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import exp, log1p

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
# Number of drafts after a token that was no draft whose probabilities are known.
NUM_RANKS = 8
# Lower bound of a chance, far below that of any draft; its logarithm is finite.
LEAST_RATE = 1e-4

# Upper bounds of the negative logarithms of shares in those groups.
BOUNDS = tuple(log1p(exp(-odds)) for odds in LOG_ODDS)
_NUM_GROUPS = 1 + len(LOG_ODDS)
# Group of matches by length, up to the longest bound.
_MATCH_GROUPS = [sum(least <= length for least in MATCHES) for length in range(MATCHES[-1] + 1)]


# Probability that a token follows a node that is right, the token, and its feature: the number of
# what that chance depends on.
Child = tuple[float, int, int]


def group_of_match(length: int) -> int:
    """Return the group of a match of ``length`` tokens, from 1."""
    return _MATCH_GROUPS[min(length, MATCHES[-1])]


def features_of(match: int, order: int, has_noise: bool) -> int:
    """Return the first feature of drafts; the next ones are those of their groups of shares.

    Drafts that are no candidates have their rank among occurrences in place of that group.

    Args:
        match: Group of the match before their earlier occurrence; 0 for none.
        order: Tokens of the context after which they were candidates; 0 if they were none.
        has_noise: Whether the target's noise is part of their shares.
    """
    return ((match * 2 + has_noise) * (ORDERS + 1) + order) * _NUM_GROUPS


class Chances:
    """Rates at which drafts were right, by feature.

    It holds no text. Texts may share it, and threads: a lost update is one draft.

    Attributes:
        rates: Chance of a draft whose parent is right, by feature.
        surprised: Mean probabilities of the drafts after a token that was no draft, by rank.
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
        self.surprised = [LEAST_RATE] * NUM_RANKS
        self._num_surprises = PRIOR

    def learn(self, children: Sequence[Child], token: int) -> None:
        """Count which child of a node that was right is the token that came."""
        rates, counts = self.rates, self._counts
        for _, draft, feature in children:
            count = counts[feature] = min(counts[feature] + 1, MEMORY)
            rate = rates[feature] + ((draft == token) - rates[feature]) / count
            rates[feature] = max(rate, LEAST_RATE)

    def note_surprise(self, probabilities: Sequence[float]) -> None:
        """Count the drafts after a token that was no draft, the most probable first."""
        self._num_surprises = count = min(self._num_surprises + 1, MEMORY)
        found = zip_longest(self.surprised, probabilities[:NUM_RANKS], fillvalue=0.0)
        self.surprised = [mean + (new - mean) / count for mean, new in found]

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
            rates[int(feature)] = max(float(rate), LEAST_RATE)
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
