"""Choices of a policy for single steps."""

from __future__ import annotations

from typing import NamedTuple

from mlx_redrafter.draft_plan import DraftPlan


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
