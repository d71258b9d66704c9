"""Which shape the next step drafts: a fixed one, or the one expected to be fastest.

Axes: W beam width, L beam length, N tree nodes.

The text does not depend on any choice made here, only the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from math import exp
from typing import Protocol

from mlx_redrafter.config import TreeShape
from mlx_redrafter.experience import Experience
from mlx_redrafter.stats import Choice
from mlx_redrafter.step_times import StepTimes

# How `AutoShape` drafts, if it does, and how many nodes of such a tree it may then verify.
CHAIN = TreeShape(1, 6, 6)
TREE = TreeShape(2, 6, 16)
SIZES = {CHAIN: (2, 3, 4, 6), TREE: (4, 6, 8, 12, 16)}
CANDIDATES = tuple(replace(way, tree_nodes=size) for way in SIZES for size in SIZES[way])

# Steps that a text begins with, taking turns with all ways of drafting, while they seem worth it.
FIRST_PROBES = 24
# How much faster another way must seem before it replaces the current one.
HYSTERESIS = 1.03
# Steps between probes; in plain decoding, where they gain nothing, they become rarer.
PROBE_EVERY = 32
LONGEST_PROBE_INTERVAL = 256
# Every so many probes tell what a plain step takes now, rather than what another way gives.
PLAIN_PROBE = 4


class Controller(Protocol):
    """Chooses the shape of every step, and hears what became of it."""

    def choose(self) -> TreeShape | None:
        """The shape of the next step, None for plain decoding."""
        ...

    def cut(self, shape: TreeShape, read_scores: Callable[[], list[float]]) -> TreeShape:
        """Decide how many nodes of a tree are verified, the first ones.

        Args:
            shape: What `choose` returned.
            read_scores: Waits for the draft and returns `TokenTree.scores`.

        Returns:
            ``shape`` with as many nodes or fewer.
        """
        ...

    def observe(self, shape: TreeShape | None, accepted: int, seconds: float | None) -> None:
        """Learn from a step of ``shape``, None for a plain one.

        Args:
            shape: What `cut` returned for it.
            accepted: How many drafts were accepted in it.
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

    def cut(self, shape: TreeShape, read_scores: Callable[[], list[float]]) -> TreeShape:
        """All of it."""
        return shape

    def observe(self, shape: TreeShape | None, accepted: int, seconds: float | None) -> None:
        """Nothing to learn."""


class AutoShape:
    """The tree with the most expected tokens per second in every step, or plain decoding.

    A way of drafting is chosen by what its steps have given; then, of the drafts at hand, those are
    verified whose probabilities are worth the time that they take. Now and then a step drafts in
    another way. What steps take is corrected as they go.

    Args:
        seconds: Duration of a step by shape, of plain decoding under None, as timed beforehand.
        before: What the text before has `taught`; the way that was best begins, or, where that was
            plain decoding, a small probe. Without it the text begins with all ways in turns.
    """

    def __init__(self, seconds: Mapping[TreeShape | None, float], before: Experience | None = None):
        self.seconds = StepTimes(seconds)
        smallest = {way: replace(way, tree_nodes=SIZES[way][0]) for way in SIZES}
        self.experience = Experience(smallest, before)
        self.current = self._best()
        self._steps = dict.fromkeys(self.seconds, 0)
        self._tokens = dict.fromkeys(self.seconds, 0)
        self._last: TreeShape | None = CHAIN
        self._next: TreeShape | None = CHAIN
        self._expected = 0.0
        self._interval = PROBE_EVERY
        self._until_probe = PROBE_EVERY
        self._probes = 0
        self._probe: list[TreeShape | None] = [CHAIN] if before and self.current is None else []
        self._first_probes = 0 if before else FIRST_PROBES

    def choose(self) -> TreeShape | None:
        """See `Controller.choose`."""
        self._next = self._choose()
        return self._next

    @property
    def taught(self) -> Experience | None:
        """What this text says of the next; None before the probes that it begins with are over."""
        return None if self._first_probes > 0 else self.experience

    def _choose(self) -> TreeShape | None:
        if self._first_probes > 0:
            return TREE if self._next == CHAIN else CHAIN
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
            self._probe = [CHAIN]
        else:
            self._interval = PROBE_EVERY
            # Of three plain steps the second is timed.
            other = CHAIN if self.current == TREE else TREE
            self._probe = [None] * 3 if self._probes % PLAIN_PROBE == 0 else [other]
        self._until_probe = self._interval

    def cut(self, shape: TreeShape, read_scores: Callable[[], list[float]]) -> TreeShape:
        """See `Controller.cut`."""
        # At n - 2, what a tree of n nodes is expected to have accepted: a draft's probability
        # counts those above it, so the probabilities add up.
        expected = list(accumulate(map(exp, read_scores())))
        trust, per_second = self.experience.trust, self._speed(self.current)

        def gain(size: int) -> float:
            """Tokens beyond those that the time of the step would give otherwise."""
            seconds = self.seconds[replace(shape, tree_nodes=size)]
            return trust * expected[size - 2] - per_second * seconds

        size = max(SIZES[shape], key=gain)
        self._expected = expected[size - 2]
        return replace(shape, tree_nodes=size)

    def observe(self, shape: TreeShape | None, accepted: int, seconds: float | None) -> None:
        """See `Controller.observe`."""
        self._steps[shape] += 1
        self._tokens[shape] += 1 + accepted
        # A plain step is dispatched before the outcome of the one before is read, which may wait
        # for both: the first of some plain steps takes twice its time, and the last one none.
        neighbours = self._last, shape, self._next
        if seconds is not None and len({one is None for one in neighbours}) == 1:
            self.seconds.learn(shape, seconds)
        self._last = shape
        if shape is not None:
            way = CHAIN if shape.beam_width == CHAIN.beam_width else TREE
            self.experience.learn(way, shape, accepted, self._expected)
        best = self._best()
        self._first_probes = 0 if best is None else self._first_probes - 1
        if self._speed(best) > HYSTERESIS * self._speed(self.current):
            self.current = best

    def choices(self) -> list[Choice]:
        """What there is to choose from, in the order of `CANDIDATES`."""
        return [
            Choice(shape, seconds, self._steps[shape], self._tokens[shape])
            for shape, seconds in self.seconds.items()
        ]

    def _best(self) -> TreeShape | None:
        return max((None, *SIZES), key=self._speed)

    def _speed(self, way: TreeShape | None) -> float:
        return self.experience.speed(way, self.seconds)
