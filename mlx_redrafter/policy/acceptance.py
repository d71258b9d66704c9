"""Running acceptance statistics: what drafting has given lately, here and in earlier texts.

Axes: L beam length; level d of a draft, from 1 to L - 1, is the nodes of depth d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Window of the running means, in steps, and of the calibration ratio, in expected drafts.
MEMORY = 16
# Weight of means carried over from the text before, in steps (of its ratio, in expected drafts).
CARRIED_OVER = 4
# Before the first step: drafts accepted of a level, relative to the level before.
PRIOR_SHARE = 0.5
# Before the first step: nodes that are verified.
PRIOR_NODES = 4
# Expected drafts after which observations outweigh the drafter's own probabilities.
PRIOR_DRAFTS = 2.0
# Bound on accepted drafts for each that was expected.
MAX_RATIO = 4.0


class AcceptanceStats:
    """Accepted drafts by level, and the calibration of the drafter's probabilities.

    Args:
        num_levels: Levels of the longest draft, at least 2.
        before: Statistics of the text before, of the same number of levels.
    """

    def __init__(self, num_levels: int, before: AcceptanceStats | None = None):
        # Mean expected number of accepted drafts per step, by level.
        self._levels = [PRIOR_SHARE**level for level in range(1, num_levels + 1)]
        # Share of the steps by number of nodes verified.
        self._shares = {PRIOR_NODES: 1.0}
        self._steps = 1
        self._expected = self._accepted = PRIOR_DRAFTS
        if before is not None:
            self._levels, self._shares = list(before._levels), dict(before._shares)
            self._steps = min(before._steps, CARRIED_OVER)
            share = min(1.0, CARRIED_OVER / before._expected)
            self._expected, self._accepted = share * before._expected, share * before._accepted

    def speed(self, length: int, seconds: Mapping[int, float]) -> float:
        """Expected tokens per second of steps with drafts of one length.

        Args:
            length: Beam length, L, at least 2.
            seconds: Duration of such a step at present, by number of nodes verified.
        """
        took = sum(share * seconds[nodes] for nodes, share in self._shares.items())
        return (1 + self.calibration_ratio * sum(self._levels[: length - 1])) / took

    @property
    def calibration_ratio(self) -> float:
        """Accepted drafts for each that was expected."""
        return min(self._accepted / self._expected, MAX_RATIO)

    def learn(self, nodes: int, accepted: int, expected: Sequence[float]) -> None:
        """Take in a step.

        Args:
            nodes: Number of nodes verified.
            accepted: Number of drafts accepted.
            expected: Sum of the probabilities of the drafts verified, for each level that was
                drafted, at least two.
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
