"""What drafting has been worth lately, in this text and in the ones before it.

Axes: L beam length; level d of a draft, from 1 to L - 1, is the nodes of depth d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Steps that a mean remembers, and that one taken over from the text before counts for (and drafts
# expected that its trust counts for).
MEMORY = 16
REMEMBERED = 4
# Of a level, relative to the one before: drafts it is guessed to give before the first step, which
# then counts for one step, as does the guess that this many nodes are verified.
GUESSED = 0.5
GUESSED_NODES = 4
# Drafts that a drafter's probabilities are believed for before they were seen to come true or not,
# and how many more than it expects may be.
BELIEVED = 2.0
MOST_TRUST = 4.0


class AcceptanceStats:
    """What every level of a draft gives, and how far its probabilities are to be trusted.

    Args:
        num_levels: Of the longest draft, at least 2.
        before: The experience of the text before, of the same number.
    """

    def __init__(self, num_levels: int, before: AcceptanceStats | None = None):
        # Means per step: drafts expected to be accepted, by level; and of steps, by nodes verified,
        # their share.
        self._levels = [GUESSED**level for level in range(1, num_levels + 1)]
        self._shares = {GUESSED_NODES: 1.0}
        self._steps = 1
        self._expected = self._accepted = BELIEVED
        if before is not None:
            self._levels, self._shares = list(before._levels), dict(before._shares)
            self._steps = min(before._steps, REMEMBERED)
            share = min(1.0, REMEMBERED / before._expected)
            self._expected, self._accepted = share * before._expected, share * before._accepted

    def speed(self, length: int, seconds: Mapping[int, float]) -> float:
        """Expected tokens per second of steps with drafts of one length.

        Args:
            length: L, at least 2.
            seconds: What such a step takes now, by the nodes that it verifies.
        """
        took = sum(share * seconds[nodes] for nodes, share in self._shares.items())
        return (1 + self.trust * sum(self._levels[: length - 1])) / took

    @property
    def trust(self) -> float:
        """Drafts accepted for each that was expected to be."""
        return min(self._accepted / self._expected, MOST_TRUST)

    def learn(self, nodes: int, accepted: int, expected: Sequence[float]) -> None:
        """Take in a step.

        Args:
            nodes: Verified.
            accepted: Drafts accepted.
            expected: Sum of the probabilities of the drafts verified, by level, of at least two:
                as many as were drafted.
        """
        self._steps = min(self._steps + 1, MEMORY)
        weight = 1 / self._steps
        levels = [
            mean + weight * (sum_ - mean)
            for mean, sum_ in zip(self._levels, expected, strict=False)
        ]
        # A level that was not drafted is taken to give as much less as the last one did.
        falls = min(1.0, levels[-1] / levels[-2]) if levels[-2] > 0 else 0.0
        while len(levels) < len(self._levels):
            levels.append(falls * levels[-1])
        self._levels = levels
        self._shares = {one: share * (1 - weight) for one, share in self._shares.items()}
        self._shares[nodes] = self._shares.get(nodes, 0.0) + weight
        kept = 1 - 1 / MEMORY
        self._expected = kept * self._expected + sum(expected)
        self._accepted = kept * self._accepted + accepted
