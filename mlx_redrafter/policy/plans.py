"""Draft plans that the adaptive policy chooses from, what their steps cost, and fixed plans.

Axes: W widths, L lengths, S sizes, N nodes verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
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
# Minimum share of the cost that padding must save, above the noise of timing.
MIN_GAIN = 0.05


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
class StepCosts:
    """Seconds of a step by its parts.

    Attributes:
        plain: A step of plain decoding.
        verify: A step that verifies N nodes and drafts nothing, by N.
        first: Drafting without its levels, by width.
        level: Each level of drafts, by width. Both are empty for prompt lookup.
        wait: Additional cost if the host reads the drafts before the target verifies them.
    """

    plain: float
    verify: Mapping[int, float]
    first: Mapping[int, float] = field(default_factory=dict)
    level: Mapping[int, float] = field(default_factory=dict)
    wait: float = 0.0

    def cheapest_size(self, num_nodes: int) -> int:
        """Return the number of nodes, at least ``num_nodes``, with the lowest cost.

        Kernels switch with the number of rows: 16 nodes may cost less than 12.
        """
        sizes = sorted(size for size in self.verify if size >= num_nodes)
        if not sizes:
            return num_nodes
        best = min(sizes, key=self.verify.__getitem__)
        is_clear = self.verify[best] < (1 - MIN_GAIN) * self.verify[sizes[0]]
        return best if is_clear else num_nodes

    def drafting(self, shape: DraftShape) -> float:
        """Return the seconds of a search; widths in between are interpolated."""
        widths = list(self.level)
        first = np.interp(shape.width, widths, list(self.first.values()))
        level = np.interp(shape.width, widths, list(self.level.values()))
        return max(0.0, float(first + shape.levels * level))


class Choice(NamedTuple):
    """Choice for one step, and what is expected of it.

    Attributes:
        plan: Plan of the drafts; None for plain decoding.
        num_nodes: Number of nodes to verify; None to choose it by the drafts' probabilities.
        tokens: Expected tokens, the target's own one included.
        seconds: Expected cost.
        waits: Whether the host waited for the drafts.
    """

    plan: DraftPlan | None = None
    num_nodes: int | None = None
    tokens: float = 1.0
    seconds: float = 1.0
    waits: bool = False

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


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
    least_chance: ClassVar[float] = 0.0

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
