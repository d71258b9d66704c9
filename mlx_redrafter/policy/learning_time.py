"""When the host learns from drafts, which takes it time that short steps do not leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Share of the time for learning, and seconds for it at first, when there is most to learn, but at
# most so much of a step: of the first text, and of those that go on from another.
SHARE, AT_FIRST, MOST_OF_STEP, MOST_LATER = 0.01, 2e-3, 0.6, 0.3
# How many tokens fewer than expected drafts have to bring to be learnt from beyond that, and how
# much of what they lack still counts after a step.
LACKING, FADING = 3.0, 0.9
# Least seconds from one time to the next: several drafts at once take less than one after another.
EVERY = 3e-3
# Share of a step that learning takes for the step's time to be no measure.
DISTURBING = 0.08


class LearningTime:
    """The host's time for learning from the drafts of a text.

    Args:
        clock: Seconds so far.
        step: Seconds of a step without drafts.
        is_first: Whether no text came before.
    """

    def __init__(self, clock: Callable[[], float], step: float, is_first: bool = True):
        self._clock = clock
        most = MOST_OF_STEP if is_first else MOST_LATER
        self._left, self._since = min(AT_FIRST, most * step), EVERY
        # Tokens that drafts have brought less than was expected, of late.
        self._lacking = 0.0
        # Seconds of learning since the newest step, and whether they disturbed the one before.
        self._newest, self._has_disturbed = 0.0, False

    @property
    def is_left(self) -> bool:
        """Whether one draft more may be learnt from."""
        return self._left >= 0 or self._lacking > LACKING

    def compare(self, expected: float, brought: float) -> None:
        """Take in the tokens of a step with drafts, and how many were expected."""
        self._lacking = max(0.0, FADING * self._lacking + expected - brought)

    @property
    def is_due(self) -> bool:
        """Whether enough time has passed since the last time."""
        return self._since >= EVERY

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Charge the time of what is learnt meanwhile."""
        start = self._clock()
        yield
        self._newest, self._since = self._clock() - start, 0.0
        self._left -= self._newest

    def take(self, seconds: float) -> bool:
        """Take in the duration of a step.

        Returns:
            Whether learning is a part of it that should not count as the step's, as other steps go
            without. Where steps take so long that all are learnt from, it counts.
        """
        self._left += SHARE * seconds
        self._since += seconds
        had_disturbed = self._has_disturbed
        self._has_disturbed = self._newest > DISTURBING * seconds
        self._newest = 0.0
        return self._has_disturbed and not had_disturbed
