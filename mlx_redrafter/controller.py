"""Which shape the next step drafts: a fixed one, or the one expected to be fastest.

Axes: W beam width, L beam length, N tree nodes.

The text does not depend on any choice made here, only the time it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mlx_redrafter.config import TreeShape
from mlx_redrafter.stats import Choice
from mlx_redrafter.step_times import StepTimes

# What `AutoShape` chooses from besides plain decoding.
CANDIDATES = (
    TreeShape(1, 2, 2),
    TreeShape(1, 3, 3),
    TreeShape(1, 4, 4),
    TreeShape(1, 5, 5),
    TreeShape(4, 4, 6),
    TreeShape(4, 5, 8),
    TreeShape(4, 5, 10),
    TreeShape(4, 6, 12),
    TreeShape(4, 6, 16),
)
# Contains all others, so that a step of it shows what each of them would have accepted.
LARGEST = CANDIDATES[-1]
# Says cheaply whether plain decoding is still the best choice.
SMALL = CANDIDATES[1]

# Acceptance of a draft that is expected before anything was seen, and the steps that counts for.
PRIOR_ACCEPTANCE = 0.5
PRIOR_STEPS = 1
# Steps of the largest shape that a text begins with; one that accepts nothing counts for four.
FIRST_PROBES = 8
FRUITLESS_PROBE = 4
# Steps that an estimate remembers.
MEMORY = 32
# How much faster another shape must seem before it replaces the current one.
HYSTERESIS = 1.03
# Steps between probes; in plain decoding, where they gain nothing, they become rarer.
PROBE_EVERY = 32
LONGEST_PROBE_INTERVAL = 256
# Drafting did not pay in a text with such a share of plain steps, or more.
MOSTLY_PLAIN = 0.9
# Every so many probes tell what a plain step takes now, rather than what the largest shape accepts.
PLAIN_PROBE = 4


@dataclass(frozen=True)
class Accepted:
    """The drafts accepted in a step, in order.

    Attributes:
        ranks: By score among all drafts of the step, from 0.
        children: By score among the children of the same parent, from 0.
    """

    ranks: list[int]
    children: list[int]

    def count_within(self, shape: TreeShape) -> int:
        """How many a smaller tree of the same drafts would have had."""
        assert shape.tree_nodes is not None
        count = 0
        for rank, child in zip(self.ranks[: shape.draft_length], self.children, strict=False):
            is_chain = shape.beam_width == 1
            if child >= shape.beam_width or (not is_chain and rank >= shape.tree_nodes - 1):
                break
            count += 1
        return count


class Controller(Protocol):
    """Chooses the shape of every step, and hears what became of it."""

    def choose(self) -> TreeShape | None:
        """The shape of the next step, None for plain decoding."""
        ...

    def observe(self, shape: TreeShape | None, accepted: Accepted, seconds: float | None) -> None:
        """Learn from a step of ``shape``, None for a plain one.

        Args:
            shape: What `choose` returned for it.
            accepted: What was accepted in it.
            seconds: From the outcome before to its own, None where the caller kept the decoder
                waiting.
        """
        ...


class FixedShape:
    """The same shape every time."""

    def __init__(self, shape: TreeShape | None):
        self.shape = shape

    def choose(self) -> TreeShape | None:
        """See `Controller.choose`."""
        return self.shape

    def observe(self, shape: TreeShape | None, accepted: Accepted, seconds: float | None) -> None:
        """Nothing to learn."""


class AutoShape:
    """The shape with the most expected tokens per second, plain decoding included.

    A step shows exactly what every shape contained in its own would have accepted. Now and then a
    step uses the largest shape, which contains all. What steps take is corrected as they go.

    Args:
        seconds: Duration of a step by shape, of plain decoding under None, as timed beforehand.
        did_pay: Whether drafting paid in the texts before. If not, this one begins with a small
            probe and plain decoding.
    """

    def __init__(self, seconds: Mapping[TreeShape | None, float], did_pay: bool = True):
        self.seconds = StepTimes(seconds)
        self._did_pay = did_pay
        self.tokens: dict[TreeShape | None, float] = {None: 1.0}
        prior = PRIOR_ACCEPTANCE if did_pay else 0.0
        for shape in CANDIDATES:
            depths = range(1, shape.draft_length + 1)
            self.tokens[shape] = 1 + sum(prior**depth for depth in depths)
        self.current = self._best()
        self._steps = dict.fromkeys(self.seconds, 0)
        self._weights = dict.fromkeys(CANDIDATES, PRIOR_STEPS)
        self._last: TreeShape | None = LARGEST
        self._next: TreeShape | None = LARGEST
        self._interval = PROBE_EVERY
        self._until_probe = PROBE_EVERY
        self._probes = 0
        self._probe: list[TreeShape | None] = [] if did_pay else [SMALL]
        self._first_probes = FIRST_PROBES if did_pay else 0

    def choose(self) -> TreeShape | None:
        """See `Controller.choose`."""
        self._next = self._choose()
        return self._next

    @property
    def pays(self) -> bool:
        """Whether drafting was faster than plain decoding; a short text does not tell."""
        total = sum(self._steps.values())
        return self._did_pay if total < PROBE_EVERY else self._steps[None] < MOSTLY_PLAIN * total

    def _choose(self) -> TreeShape | None:
        if self._first_probes > 0:
            return LARGEST
        if not self._probe:
            self._until_probe -= 1
            if self._until_probe > 0:
                return self.current
            self._begin_probe()
        return self._probe.pop()

    def _begin_probe(self) -> None:
        self._probes += 1
        if self.current is None:
            self._interval = min(2 * self._interval, LONGEST_PROBE_INTERVAL)
            self._probe = [SMALL]
        else:
            self._interval = PROBE_EVERY
            # Of three plain steps the second is timed.
            self._probe = [None] * 3 if self._probes % PLAIN_PROBE == 0 else [LARGEST]
        self._until_probe = self._interval

    def observe(self, shape: TreeShape | None, accepted: Accepted, seconds: float | None) -> None:
        """See `Controller.observe`."""
        self._steps[shape] += 1
        # The next step is dispatched before the outcome of this one is read, which may wait for
        # both: among others the first plain step takes twice its time, and the last one none.
        if seconds is not None and self._last == shape == self._next:
            self.seconds.learn(shape, seconds)
        self._last = shape
        if shape is not None:
            self._learn_acceptance(shape, accepted)
        best = self._best()
        if self._speed(best) > HYSTERESIS * self._speed(self.current):
            self.current = best

    def _learn_acceptance(self, shape: TreeShape, accepted: Accepted) -> None:
        self._first_probes -= 1 if accepted.ranks else FRUITLESS_PROBE
        for candidate in CANDIDATES:
            if contains(shape, candidate):
                self._weights[candidate] = min(self._weights[candidate] + 1, MEMORY)
                change = 1 + accepted.count_within(candidate) - self.tokens[candidate]
                self.tokens[candidate] += change / self._weights[candidate]

    def choices(self) -> list[Choice]:
        """What there is to choose from, fastest first."""
        shapes = sorted(self.seconds, key=self._speed, reverse=True)
        return [Choice(s, self.seconds[s], self.tokens[s], self._steps[s]) for s in shapes]

    def _best(self) -> TreeShape | None:
        return max(self.seconds, key=self._speed)

    def _speed(self, shape: TreeShape | None) -> float:
        return self.tokens[shape] / self.seconds[shape]


def contains(shape: TreeShape, other: TreeShape) -> bool:
    """Whether a step of ``shape`` shows what ``other`` would have accepted."""
    assert shape.tree_nodes is not None
    assert other.tree_nodes is not None
    return (
        shape.beam_width >= other.beam_width
        and shape.beam_length >= other.beam_length
        and shape.tree_nodes >= other.tree_nodes
    )
