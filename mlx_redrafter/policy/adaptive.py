"""Which shape the next step drafts: a fixed one, or the one expected to be fastest.

Axes: W beam width, L beam length, N tree nodes.

The text does not depend on any choice made here, only the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from math import exp
from typing import NamedTuple, Protocol

from mlx_redrafter.config import TreeShape
from mlx_redrafter.decoding.stats import ShapeStats
from mlx_redrafter.policy.acceptance import AcceptanceStats
from mlx_redrafter.policy.step_times import StepTimes

# How `AdaptivePolicy` drafts, if it does, and how many nodes of such a tree it may then verify.
WIDTH = 2
LENGTHS = (3, 4, 5, 6, 7, 8)
SIZES = (2, 4, 6, 8, 12, 16)
# By the shape that is drafted, the largest of its length, those that may be verified, by nodes.
TREES = {
    TreeShape(WIDTH, length, SIZES[-1]): {size: TreeShape(WIDTH, length, size) for size in SIZES}
    for length in LENGTHS
}
SHORTEST, *_, LONGEST = TREES
CANDIDATES = tuple(shape for shapes in TREES.values() for shape in shapes.values())

# Steps for which the first text drafts even where plain decoding seems faster, and the share of its
# speed that drafting must seem to have meanwhile: nothing is known yet but a few drafts.
TRIAL = 8
PLAUSIBLE = 0.8
# Steps with drafts between plain ones that tell what these take now, and plain steps until a draft
# tells what drafts are worth now, which become more.
PLAIN_EVERY = 128
DRAFT_EVERY = 32
DRAFT_EVERY_AT_MOST = 256


class Drafts(NamedTuple):
    """What is known of the drafts of a tree, which are all its nodes but the first, in order.

    Attributes:
        scores: As in `TokenTree`.
        depths: Edges from the root.
    """

    scores: list[float]
    depths: list[int]


class DraftPolicy(Protocol):
    """Chooses the shape of every step, and hears what became of it."""

    def choose(self) -> TreeShape | None:
        """The shape of the next step, None for plain decoding."""
        ...

    def cut(self, shape: TreeShape, read: Callable[[], Drafts]) -> TreeShape:
        """Decide how many nodes of a tree are verified, the first ones.

        Args:
            shape: What `choose` returned.
            read: Waits for the drafts.

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


class FixedPolicy:
    """The same shape every time."""

    def __init__(self, shape: TreeShape | None):
        self.shape = shape

    def choose(self) -> TreeShape | None:
        """See `DraftPolicy.choose`."""
        return self.shape

    def cut(self, shape: TreeShape, read: Callable[[], Drafts]) -> TreeShape:
        """All of it."""
        return shape

    def observe(self, shape: TreeShape | None, accepted: int, seconds: float | None) -> None:
        """Nothing to learn."""


class AdaptivePolicy:
    """The tree with the most expected tokens per second in every step, or plain decoding.

    How far a step drafts is chosen by what levels have given; then, of the drafts at hand, those
    are verified whose probabilities are worth the time that they take. What steps take is corrected
    as they go.

    Args:
        seconds: Duration of a step by shape, of plain decoding under None, as timed beforehand.
        before: What the text before has `carried_over`. Without it, plain decoding is only chosen in the
            first steps where it seems much faster.
    """

    def __init__(
        self, seconds: Mapping[TreeShape | None, float], before: AcceptanceStats | None = None
    ):
        self.seconds = StepTimes(seconds)
        self.experience = AcceptanceStats(LONGEST.draft_length, before)
        self._trial = 0 if before else TRIAL
        self.current = self._best()
        self._steps = dict.fromkeys(self.seconds, 0)
        self._tokens = dict.fromkeys(self.seconds, 0)
        self._last = self._next = self.current
        self._expected = [0.0]
        self._interval = self._until_probe = self._first_interval()
        # What the next steps are, the last one first, before they are `current` again.
        self._probe: list[TreeShape | None] = [] if self.current else [self._best_tree()]

    def choose(self) -> TreeShape | None:
        """See `DraftPolicy.choose`."""
        self._next = self._choose()
        return self._next

    @property
    def carried_over(self) -> AcceptanceStats | None:
        """What this text says of the next; None before its trial is over."""
        return None if self._trial > 0 else self.experience

    def _choose(self) -> TreeShape | None:
        if not self._probe:
            self._until_probe -= 1
            if self._until_probe > 0:
                return self.current
            self._begin_probe()
        return self._probe.pop()

    def _first_interval(self) -> int:
        return DRAFT_EVERY if self.current is None else PLAIN_EVERY

    def _begin_probe(self) -> None:
        if self.current is None:
            self._interval = min(2 * self._interval, DRAFT_EVERY_AT_MOST)
            self._probe = [self._best_tree()]
        else:
            # The second of three is timed.
            self._probe = [None] * 3
        self._until_probe = self._interval

    def cut(self, shape: TreeShape, read: Callable[[], Drafts]) -> TreeShape:
        """See `DraftPolicy.cut`."""
        shapes = TREES[shape]
        scores, depths = read()
        probabilities = list(map(exp, scores))
        # At n - 2, what a tree of n nodes is expected to have accepted: a draft's probability
        # counts those above it, so the probabilities add up.
        expected = list(accumulate(probabilities))
        trust, per_second = self.experience.trust, self._speed(self.current)

        def gain(size: int) -> float:
            """Tokens beyond those that the time of the step would give otherwise."""
            return trust * expected[size - 2] - per_second * self.seconds[shapes[size]]

        size = max(shapes, key=gain)
        self._expected = [0.0] * shape.draft_length
        for depth, probability in zip(depths[: size - 1], probabilities, strict=False):
            self._expected[depth - 1] += probability
        return shapes[size]

    def observe(self, shape: TreeShape | None, accepted: int, seconds: float | None) -> None:
        """See `DraftPolicy.observe`."""
        self._steps[shape] += 1
        self._tokens[shape] += 1 + accepted
        # A plain step is dispatched before the outcome of the one before is read, which may wait
        # for both: the first of some plain steps takes twice its time, and the last one none.
        neighbours = self._last, shape, self._next
        if seconds is not None and len({one is None for one in neighbours}) == 1:
            self.seconds.learn(shape, seconds)
        self._last = shape
        if shape is not None:
            assert shape.tree_nodes is not None
            self.experience.learn(shape.tree_nodes, accepted, self._expected)
        before, self.current = self.current, self._best()
        self._trial = 0 if self.current is None else self._trial - 1
        if (before is None) != (self.current is None):
            self._interval = self._until_probe = self._first_interval()

    def choices(self) -> list[ShapeStats]:
        """See `DecodingStats.choices`; the others in the order of `CANDIDATES`."""
        return [
            ShapeStats(shape, seconds, self._steps[shape], self._tokens[shape])
            for shape, seconds in self.seconds.items()
            if shape is None or self._steps[shape]
        ]

    def _best(self) -> TreeShape | None:
        tree = self._best_tree()
        least = PLAUSIBLE if self._trial > 0 else 1.0
        return tree if self._speed(tree) > least * self._speed(None) else None

    def _best_tree(self) -> TreeShape:
        return max(TREES, key=self._speed)

    def _speed(self, tree: TreeShape | None) -> float:
        """Expected tokens per second."""
        if tree is None:
            return 1 / self.seconds[None]
        seconds = {size: self.seconds[shape] for size, shape in TREES[tree].items()}
        return self.experience.speed(tree.beam_length, seconds)
