"""Draft plans that the adaptive policy chooses from, and the policy of one plan.

Axes: W widths, L lengths, S sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.trees.tree import TokenTree

Floats = npt.NDArray[np.float64]

# Beam widths: a chain and a narrow tree, whose search scores four children of every beam.
WIDTHS = (1, 2)
# Beam lengths in tokens, root included; lengths in between are about as fast as both neighbours.
LENGTHS = (2, 3, 4, 5, 6, 8, 10)
# Numbers of nodes to verify, root included; the steps that are timed on the machine.
SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)

# Plans with all drafts that their search scores, by place in WIDTHS and LENGTHS.
PLANS = {
    (w, n): DraftPlan(shape := DraftShape(width, length), shape.max_nodes)
    for w, width in enumerate(WIDTHS)
    for n, length in enumerate(LENGTHS)
}
PLACES = {plan.shape: place for place, plan in PLANS.items()}
SHORTEST, WIDEST = PLANS[0, 0], PLANS[len(WIDTHS) - 1, 0]
LONGEST = PLANS[len(WIDTHS) - 1, len(LENGTHS) - 1]
# Prompt lookup costs no draft time, so it may draft many tokens.
LOOKUP = DraftPlan(DraftShape(4, 16), SIZES[-1], from_text=True)
# Number of drafts that a step verifies: none, or one less than the nodes of each size.
COUNTS = (0, *(size - 1 for size in SIZES))
# Whether a plan has as many drafts as each of COUNTS, shape (W, L, 1 + S).
FITS = np.array(
    [
        [[count < PLANS[w, n].num_nodes for count in COUNTS] for n in range(len(LENGTHS))]
        for w in range(len(WIDTHS))
    ]
)


def checked(
    values: Any, shape: tuple[int, ...], least: float | Floats, most: float | Floats
) -> Floats:
    """Return the numbers of a file as an array.

    Raises:
        ValueError: They have another shape, or some are out of range.
    """
    found = np.array(values, dtype=np.float64)
    if found.shape != shape or not ((found >= least) & (found <= most)).all():
        raise ValueError(f"expected numbers between {least} and {most} of shape {shape}")
    return found


@dataclass(frozen=True)
class FixedPolicy:
    """A `DraftPolicy` with the same plan in every step.

    Attributes:
        plan: Plan of every step that has something to propose; None for plain decoding.
        costs: Seconds of steps, by which trees are padded; None to leave trees as they are.
    """

    plan: DraftPlan | None
    costs: StepCosts | None = None
    reads_drafts: ClassVar[bool] = False

    def choose(self, matches: Sequence[float] | None) -> DraftPlan | None:
        has_nothing = matches is not None and len(matches) == 0
        return None if has_nothing else self.plan

    def select(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """Keep all nodes, with padding if a larger size costs less."""
        return tree if self.costs is None else tree.padded(self.costs.cheapest_size(tree.size))

    def select_early(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        return self.select(plan, tree)

    def observe(self, step: Step) -> None:
        """Do nothing."""
