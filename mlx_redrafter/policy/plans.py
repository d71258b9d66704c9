"""Draft plans that the adaptive policy chooses from.

Axes: W widths, L lengths, S sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mlx_redrafter.draft_plan import DraftPlan, DraftShape

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


class Choice(NamedTuple):
    """Choice of the adaptive policy for one step.

    Attributes:
        plan: Plan of the drafts; None for plain decoding.
        num_nodes: Number of nodes to verify; None to choose it by the drafts' probabilities.
        is_trial: Whether the step is a trial, which the exploration budget pays for.
    """

    plan: DraftPlan | None = None
    num_nodes: int | None = None
    is_trial: bool = False


PLAIN = Choice()


def probe(plan: DraftPlan) -> Choice:
    """Choose a plain step with drafts drawn next to it, to be scored and not verified."""
    return Choice(replace(plan, num_nodes=1), 1)
