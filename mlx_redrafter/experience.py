"""What drafting has been worth lately, in this text and in the ones before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlx_redrafter.config import TreeShape

# Steps that a mean remembers, that one taken over from the text before counts for (and drafts
# expected that its trust counts for), and that a guess made before the first step counts for.
MEMORY = 16
REMEMBERED = 4
GUESSED = 1
# Drafts that a step is guessed to expect, before there was one.
GUESSED_DRAFTS = 0.75
# Drafts that a drafter's probabilities are believed for before they were seen to come true or not,
# and how many more than it expects may be.
BELIEVED = 2.0
MOST_TRUST = 4.0


@dataclass(frozen=True)
class Yield:
    """What a way of drafting gives.

    Attributes:
        expected: Mean per step of the drafts expected to be accepted.
        shares: Of steps, by the shape that was verified; they add up to 1.
        steps: That both are of, as far as they are remembered.
    """

    expected: float
    shares: Mapping[TreeShape, float]
    steps: int

    def after(self, shape: TreeShape, expected: float) -> Yield:
        """With one more step."""
        steps = min(self.steps + 1, MEMORY)
        shares = {one: share * (1 - 1 / steps) for one, share in self.shares.items()}
        shares[shape] = shares.get(shape, 0.0) + 1 / steps
        return Yield(self.expected + (expected - self.expected) / steps, shares, steps)


class Experience:
    """What every way of drafting gives, and how far its probabilities are to be trusted.

    Args:
        guesses: By way of drafting, the shape that it is guessed to verify.
        before: The experience of the text before, of the same ways.
    """

    def __init__(self, guesses: Mapping[TreeShape, TreeShape], before: Experience | None = None):
        self._yields = {
            way: Yield(GUESSED_DRAFTS, {shape: 1.0}, GUESSED) for way, shape in guesses.items()
        }
        self._expected = self._accepted = BELIEVED
        if before is not None:
            self._yields = {
                way: replace(one, steps=min(one.steps, REMEMBERED))
                for way, one in before._yields.items()
            }
            share = min(1.0, REMEMBERED / before._expected)
            self._expected, self._accepted = share * before._expected, share * before._accepted

    def speed(self, way: TreeShape | None, seconds: Mapping[TreeShape | None, float]) -> float:
        """Expected tokens per second.

        Args:
            way: Of drafting; None for plain decoding.
            seconds: What a step of every shape takes now.
        """
        if way is None:
            return 1 / seconds[None]
        known = self._yields[way]
        took = sum(share * seconds[shape] for shape, share in known.shares.items())
        return (1 + self.trust * known.expected) / took

    @property
    def trust(self) -> float:
        """Drafts accepted for each that was expected to be."""
        return min(self._accepted / self._expected, MOST_TRUST)

    def learn(self, way: TreeShape, shape: TreeShape, accepted: int, expected: float) -> None:
        """Take in a step.

        Args:
            way: How it drafted.
            shape: What was verified.
            accepted: Drafts accepted.
            expected: Sum of the probabilities of the drafts verified.
        """
        self._yields[way] = self._yields[way].after(shape, expected)
        kept = 1 - 1 / MEMORY
        self._expected = kept * self._expected + expected
        self._accepted = kept * self._accepted + accepted
