"""The same plan at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.trees.tree import TokenTree


@dataclass(frozen=True)
class FixedPolicy:
    """A `DraftPolicy` that always does the same.

    Attributes:
        plan: Plan of every step that has something to propose; None for plain decoding.
        costs: Seconds of steps, by which trees are padded; None to leave them as they are.
    """

    plan: DraftPlan | None
    costs: StepCosts | None = None

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        """See `DraftPolicy.choose`."""
        has_nothing = outlook is not None and len(outlook) == 0
        return None if has_nothing else self.plan

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """See `DraftPolicy.keep`; all nodes are, with padding where that takes less time."""
        return tree if self.costs is None else tree.padded(self.costs.cheapest_size(tree.size))

    def observe(self, step: Step) -> None:
        """See `DraftPolicy.observe`; there is nothing to learn."""
