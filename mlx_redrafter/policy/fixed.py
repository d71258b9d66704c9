"""The same draft plan in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.trees.tree import TokenTree


@dataclass(frozen=True)
class FixedPolicy:
    """A `DraftPolicy` with the same plan in every step.

    Attributes:
        plan: Plan of every step that has something to propose; None for plain decoding.
        costs: Seconds of steps, by which trees are padded; None to leave trees as they are.
    """

    plan: DraftPlan | None
    costs: StepCosts | None = None

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        has_nothing = outlook is not None and len(outlook) == 0
        return None if has_nothing else self.plan

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """Keep all nodes, with padding if a larger size costs less."""
        return tree if self.costs is None else tree.padded(self.costs.cheapest_size(tree.size))

    def observe(self, step: Step) -> None:
        """Do nothing."""
