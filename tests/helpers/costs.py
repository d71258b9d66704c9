"""Step times in place of measured ones, so that no choice depends on a clock."""

from typing import Any

import pytest

from mlx_redrafter.decoding.delivery import StepClock
from mlx_redrafter.engine import engine
from mlx_redrafter.policy.plans import SIZES, WIDTHS, StepCosts


def fix_costs(patch: pytest.MonkeyPatch) -> None:
    """Give every engine the same step times.

    Plain decoding seems so slow that drafts are never given up, and 12 nodes so slow that fixed
    trees with as many or a few less are padded.
    """
    verify = {size: 1 + 0.01 * size for size in SIZES}
    costs = StepCosts(99.0, verify, dict.fromkeys(WIDTHS, 0.0), dict.fromkeys(WIDTHS, 0.01))
    lookups = StepCosts(99.0, verify | {12: 1.5})

    def step_costs(target: Any, proposer: Any, *_: Any) -> StepCosts:
        return costs if proposer else lookups

    patch.setattr(engine, "step_costs", step_costs)


def stop_clock(patch: pytest.MonkeyPatch) -> None:
    """Measure no step, so that a busy machine cannot change the default's sizes of trees."""
    patch.setattr(StepClock, "lap", lambda self: None)
