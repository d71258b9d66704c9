"""Estimates of a policy, which one sequence hands to the next."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_redrafter.policy.calibration import Calibration
from mlx_redrafter.policy.plans import checked
from mlx_redrafter.policy.step_times import SPARE, Guard, TimeRatios
from mlx_redrafter.policy.value import ExpectedDrafts

# Share of the time for exploring, half for drafts and half for switches, see `exploration`.
EXPLORE = 0.01
# Share of the time for learning on the host; the cost of one plain step is lent.
LEARNING = 0.03


@dataclass
class Budget:
    """Seconds that are saved for exploration, and for learning on the host.

    Attributes:
        drafts: Seconds for shadow drafts and larger ones.
        switches: Seconds for switches.
        learning: Seconds for learning.
        num_larger: Number of times that larger drafts were paid for.
    """

    drafts: float = 0.0
    switches: float = 0.0
    learning: float = 0.0
    num_larger: int = 0

    def save(self, seconds: float, most: float) -> None:
        """Save shares of a step's cost, up to ``most`` seconds for each purpose."""
        self.drafts = min(most, self.drafts + EXPLORE / 2 * seconds)
        self.switches = min(most, self.switches + EXPLORE / 2 * seconds)
        self.learning = min(most, self.learning + LEARNING * seconds)

    def pay_drafts(self, seconds: float, is_larger: bool) -> bool:
        """Pay for shadow drafts, or larger ones, if there is enough; return whether there was."""
        if self.drafts < seconds:
            return False
        self.drafts -= seconds
        self.num_larger += is_larger
        return True

    def pay_switch(self, seconds: float) -> bool:
        """Spend all that is saved for switches if that is enough; return whether it was.

        Nothing is kept: a switch that gains would pay for the next one.
        """
        if self.switches < seconds:
            return False
        self.switches = 0.0
        return True

    def pay_learning(self, seconds: float) -> None:
        """Pay for the host's time."""
        self.learning -= seconds


@dataclass
class PolicyState:
    """Estimates that one sequence hands to the next.

    Attributes:
        calibration: Probabilities of drafts.
        drafts: Accepted drafts of every plan.
        ratios: Ratios of measured to stored costs.
        guard: Losses of drafting; None before the first step.
        budget: Time for exploration and learning.
    """

    calibration: Calibration = field(default_factory=Calibration)
    drafts: ExpectedDrafts = field(default_factory=ExpectedDrafts)
    ratios: TimeRatios = field(default_factory=TimeRatios)
    guard: Guard | None = None
    budget: Budget = field(default_factory=Budget)

    def begin_guard(self, plain: float) -> Guard:
        """Return the guard, a new one for plain steps of this cost if there is none."""
        if self.guard is None:
            self.guard = Guard(plain)
        return self.guard

    def stored(self) -> dict[str, Any]:
        """Return the estimates as numbers, for a file; no text is among them."""
        return {
            "calibration": self.calibration.stored(),
            "drafts": self.drafts.stored(),
            "ratios": self.ratios.stored(),
            "guard": None if self.guard is None else self.guard.stored(),
            "budget": [max(0.0, self.budget.drafts), max(0.0, self.budget.switches)],
        }

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> PolicyState:
        """Begin with the numbers of a file, of which each part weighs half at most.

        Raises:
            ValueError: They are damaged; KeyError, TypeError or AttributeError, too.
        """
        drafts, switches = checked(stored["budget"], (2,), 0.0, 3600 * SPARE).tolist()
        guard = stored["guard"]
        return cls(
            Calibration.restored(stored["calibration"]),
            ExpectedDrafts.restored(stored["drafts"]),
            TimeRatios.restored(stored["ratios"]),
            None if guard is None else Guard.restored(guard),
            Budget(drafts, switches),
        )

    def for_next(self) -> PolicyState:
        """Return a copy for the next sequence, in which counts weigh half."""
        following = deepcopy(self)
        following.drafts.fade()
        following.ratios.fade()
        if following.guard is not None:
            following.guard.fade()
        return following

    def without_times(self) -> PolicyState:
        """Return a copy for steps whose costs are others."""
        return replace(deepcopy(self), ratios=TimeRatios(), guard=None)
