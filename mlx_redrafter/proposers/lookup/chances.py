"""Chances that drafts of a lookup are right, learned from the text as it goes."""

from collections.abc import Sequence
from functools import cache
from itertools import zip_longest
from math import exp, floor, sqrt

# Number of groups of shares; the last one holds those below 8e-7.
NUM_SHARES = 16
# Number of groups of matches by length, which double: 0, 1, 2, 4, 8, 16 and 32 tokens or more.
NUM_MATCHES = 7
# Window of the running means, in drafts.
MEMORY = 64
# Weight of a chance before its first draft, in drafts.
PRIOR = 4
# Number of drafts after a token that was no draft whose probabilities are known.
NUM_RANKS = 8
# Lower bound of a chance, far below that of any draft; its logarithm is finite.
LEAST_RATE = 1e-4

# Probability that a token follows a node that is right, the token, and the number of its feature.
Child = tuple[float, int, int]


def match_feature(length: int) -> int:
    """Return the feature of the token after a match of ``length`` tokens; 0 of none."""
    return min(length.bit_length(), NUM_MATCHES - 1) * (NUM_SHARES + 1)


def share_feature(log_share: float) -> int:
    """Return the feature of a candidate; with a match before it, that of both is their sum."""
    return 1 + floor(min(4 * sqrt(max(0.0, -log_share)), NUM_SHARES - 1))  # NaN counts as 0


class Chances:
    """Rates at which drafts were right, by feature.

    It holds no text. Texts may share it, and threads: a lost update is one draft. ``surprised`` has
    mean probabilities of the drafts after a token that was no draft, by rank.
    """

    def __init__(self) -> None:
        self.rates = [_prior(feature) for feature in range(NUM_MATCHES * (NUM_SHARES + 1))]
        self._counts = [PRIOR] * len(self.rates)
        self.surprised, self._num_surprises = [LEAST_RATE] * NUM_RANKS, PRIOR

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


@cache
def _prior(feature: int) -> float:
    """Return a chance before any draft is counted."""
    match, share = divmod(feature, NUM_SHARES + 1)
    candidate = 0.7 * exp(-(((share - 0.5) / 4) ** 2)) if share else 0.0
    return max(LEAST_RATE, candidate, 0.2 + 0.11 * match if match else 0.0)
