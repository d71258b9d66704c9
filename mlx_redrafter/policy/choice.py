"""What the adaptive policy chooses for a step."""

from __future__ import annotations

from typing import NamedTuple

from mlx_redrafter.draft_plan import DraftPlan


class Choice(NamedTuple):
    """What is drafted and verified next.

    Attributes:
        plan: Plan of the drafts; None for plain decoding.
        num_nodes: Nodes to verify; None to decide that by the drafts' probabilities.
    """

    plan: DraftPlan | None
    num_nodes: int | None = None


PLAIN = Choice(None)
