"""Which shape the next step drafts: a fixed one, or the one expected to be fastest.

Axes: W beam width, L beam length, N tree nodes.

The text does not depend on any choice made here, only the time it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mlx_redrafter.config import TreeShape
from mlx_redrafter.stats import Choice
from mlx_redrafter.step_times import StepTimes
from mlx_redrafter.step_tokens import Accepted, StepTokens

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

# Steps of the largest shape that a text begins with; one that accepts nothing counts for four.
FIRST_PROBES = 8
FRUITLESS_PROBE = 4
# How much faster another shape must seem before it replaces the current one.
HYSTERESIS = 1.03
# Steps between probes; in plain decoding, where they gain nothing, they become rarer.
PROBE_EVERY = 32
LONGEST_PROBE_INTERVAL = 256
# Every so many probes tell what a plain step takes now, rather than what the largest shape accepts.
PLAIN_PROBE = 4


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

    Now and then a step uses the largest shape, which shows what all would have accepted. What steps
    take is corrected as they go.

    Args:
        seconds: Duration of a step by shape, of plain decoding under None, as timed beforehand.
        before: What the text before has `taught`; the shape that was best begins, or, where that
            was plain decoding, a small probe. Without it the text begins with the largest shape.
    """

    def __init__(self, seconds: Mapping[TreeShape | None, float], before: StepTokens | None = None):
        self.seconds = StepTimes(seconds)
        self.tokens = StepTokens(CANDIDATES, before)
        self.current = self._best()
        self._steps = dict.fromkeys(self.seconds, 0)
        self._last: TreeShape | None = LARGEST
        self._next: TreeShape | None = LARGEST
        self._interval = PROBE_EVERY
        self._until_probe = PROBE_EVERY
        self._probes = 0
        self._probe: list[TreeShape | None] = [SMALL] if before and self.current is None else []
        self._first_probes = 0 if before else FIRST_PROBES

    def choose(self) -> TreeShape | None:
        """See `Controller.choose`."""
        self._next = self._choose()
        return self._next

    @property
    def taught(self) -> StepTokens | None:
        """What this text says of the next; None before the probes that it begins with are over."""
        return None if self._first_probes > 0 else self.tokens

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
            self.tokens.learn(shape, accepted)
            self._first_probes -= 1 if accepted.ranks else FRUITLESS_PROBE
        best = self._best()
        if self._speed(best) > HYSTERESIS * self._speed(self.current):
            self.current = best

    def choices(self) -> list[Choice]:
        """What there is to choose from, fastest first."""
        shapes = sorted(self.seconds, key=self._speed, reverse=True)
        return [Choice(s, self.seconds[s], self.tokens[s], self._steps[s]) for s in shapes]

    def _best(self) -> TreeShape | None:
        return max(self.seconds, key=self._speed)

    def _speed(self, shape: TreeShape | None) -> float:
        return self.tokens[shape] / self.seconds[shape]
