"""Counts of what decoding did; ratios are derived from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mlx_redrafter.config import TreeShape


class ShapeStats(NamedTuple):
    """A shape that steps had, or plain decoding, and what became of it.

    Attributes:
        shape: What is drafted, and how much of it is verified; None is plain decoding.
        seconds: Of a step, as timed on this machine and corrected by the steps of this text.
        steps: That had this shape.
        tokens: That these steps gave.
    """

    shape: TreeShape | None
    seconds: float
    steps: int
    tokens: int


@dataclass
class DecodingStats:
    """Counts over the steps of one request. A step is one verify whose outcome was used.

    The first token comes from the prefill and belongs to no step.

    Attributes:
        num_tokens: Tokens yielded, stop token included.
        accepted_counts: At index a, the steps that accepted a drafts.
        num_verified: Nodes verified in all steps, roots included.
        num_unmerged: What they would have been had shared prefixes not been merged.
        choices: What steps were, plain decoding in any case and first, once the text has ended;
            empty where the shape was fixed.
    """

    num_tokens: int = 0
    accepted_counts: list[int] = field(default_factory=list)
    num_verified: int = 0
    num_unmerged: int = 0
    choices: list[ShapeStats] = field(default_factory=list)

    def count_step(self, num_accepted: int, num_verified: int, num_unmerged: int) -> None:
        """Count one step."""
        missing = num_accepted + 1 - len(self.accepted_counts)
        self.accepted_counts.extend([0] * missing)
        self.accepted_counts[num_accepted] += 1
        self.num_verified += num_verified
        self.num_unmerged += num_unmerged

    @property
    def steps(self) -> int:
        """Number of steps."""
        return sum(self.accepted_counts)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens yielded per step without the first token; None before the first step.

        Mean acceptance length in vLLM's terms.
        """
        return (self.num_tokens - 1) / self.steps if self.steps else None

    @property
    def acceptance_rate_by_depth(self) -> list[float]:
        """At index d - 1, the share of steps that accepted at least d drafts."""
        counts = self.accepted_counts
        return [sum(counts[depth:]) / self.steps for depth in range(1, len(counts))]
