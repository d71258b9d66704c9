"""What the steps of texts have shown, for those to come."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_redrafter.policy.calibration import Calibration
from mlx_redrafter.policy.gains import Gains
from mlx_redrafter.policy.promises import Promises
from mlx_redrafter.policy.slowdowns import Slowdowns

# Steps until the first trial, see `AdaptivePolicy`.
TRIAL_AT_FIRST = 32
# Plain steps at first where times are calculated: how much of what drafts take slows all steps down
# shows in those without.
PLAIN_AT_FIRST = 4


class Experience:
    """What the steps of a text have shown, which the next text goes on with.

    Args:
        sizes: Numbers of nodes of steps, ascending, 1 for plain decoding.
        before: Experience of the text before.
    """

    def __init__(self, sizes: Sequence[int], before: Experience | None = None):
        self.calibration: Calibration = Calibration(None if before is None else before.calibration)
        self.gains: Gains = Gains(None if before is None else before.gains)
        self.slowdowns: Slowdowns = Slowdowns(sizes, None if before is None else before.slowdowns)
        # Of steps whose drafts are not verified, beyond those of plain steps.
        self.in_vain: Slowdowns = Slowdowns([1], None if before is None else before.in_vain)
        # Of steps with drafts out of the text, beyond those of a network's with as many nodes: the
        # host is not ahead of the device there, as it drafts what the outcome tells.
        self.lookups: Slowdowns = Slowdowns([1], None if before is None else before.lookups)
        # Of the tokens that they bring: of the first one, and of those chosen before the outcome of
        # one is known.
        self.promises: tuple[Promises, Promises] = (Promises(), Promises())
        if before is not None:
            first, further = before.promises
            self.promises = Promises(first), Promises(further)
        # Steps until what is not in use is timed: texts may be short.
        self.until_trial: int = TRIAL_AT_FIRST if before is None else max(1, before.until_trial)
        # How many times as many after trials that have shown nothing new, where drafts are in use
        # and where none are.
        self.calm: dict[bool, int] = {False: 1, True: 1} if before is None else before.calm
        # Plain steps that are due, whatever seems best.
        self.plain_due: int = 0 if before is None else before.plain_due
        self._sizes = sizes

    def forget_times(self) -> None:
        """Begin anew with slowdowns, as steps are to be timed again."""
        self.slowdowns = Slowdowns(self._sizes)
        self.in_vain, self.lookups = Slowdowns([1]), Slowdowns([1])

    def begin_batch(self, num_texts: int) -> None:
        """Go on as the experience of so many texts together, whose times are calculated."""
        self.forget_times()
        self.slowdowns = Slowdowns(self._sizes, are_calculated=True)
        self.gains = Gains(self.gains, num_texts)
        self.plain_due = PLAIN_AT_FIRST
