"""Steps of a text by what was drafted and verified, and what they gave."""

from __future__ import annotations

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.decoding.stats import ShapeStats
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.candidates import PLACES
from mlx_redrafter.policy.prices import Prices
from mlx_redrafter.policy.slowdowns import Slowdowns
from mlx_redrafter.policy.step_costs import StepCosts


class Tally:
    """Numbers of steps and tokens by plan and number of nodes."""

    def __init__(self) -> None:
        self._counts: dict[tuple[DraftPlan | None, int], list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def count(self, step: Step, num_steps: int = 1) -> None:
        """Take in a step, or several with the tokens of all."""
        counts = self._counts.setdefault((step.plan and step.plan.searched, step.num_nodes), [0, 0])
        counts[0] += num_steps
        counts[1] += len(step.tokens)

    def shapes(self, prices: Prices, costs: StepCosts, slowdowns: Slowdowns) -> list[ShapeStats]:
        """Plain decoding first, then drafts in the order of their shapes.

        Args:
            prices: Seconds of steps at present.
            costs: Seconds of steps as timed beforehand.
            slowdowns: Ratios of present times to those.
        """
        found = [ShapeStats(None, float(prices.plain), *self._counts.get((None, 1), (0, 0)))]
        for (plan, num_nodes), counts in sorted(self._counts.items(), key=_place_of_kind):
            if plan is not None:
                shape = None if plan.from_text else plan.shape
                seconds = costs.step(None, num_nodes, waits=False) * slowdowns.of(num_nodes)
                seconds += 0.0 if shape is None else float(prices.drafting[PLACES[shape]])
                kind = DraftPlan(plan.shape, num_nodes, plan.from_text)
                found.append(ShapeStats(kind, seconds, *counts))
        return found


def _place_of_kind(item: tuple[tuple[DraftPlan | None, int], object]) -> tuple[int, ...]:
    (plan, num_nodes), _ = item
    return () if plan is None else (plan.from_text, plan.shape.width, plan.shape.length, num_nodes)
