"""Estimates of a policy, which one sequence hands to the next."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_redrafter.policy.calibration import Calibration
from mlx_redrafter.policy.exploration import Budget
from mlx_redrafter.policy.plans import checked
from mlx_redrafter.policy.step_times import SPARE, Guard, TimeRatios
from mlx_redrafter.policy.value import ExpectedDrafts


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
