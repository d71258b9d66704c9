"""Counts of steps and tokens, and the ratios that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mlx_redrafter.draft_plan import DraftPlan


class ShapeStats(NamedTuple):
    """The steps of one kind, and their outcomes.

    Attributes:
        plan: Plan of the drafts, with the number of nodes verified; None for plain decoding.
        seconds: Mean measured cost of such a step; the expected one if there was none.
        steps: Number of steps of this kind.
        tokens: Tokens emitted by those steps.
        expected_seconds: Mean cost that the policy expected.
        expected_tokens: Tokens that the policy expected of those steps.
    """

    plan: DraftPlan | None
    seconds: float
    steps: int
    tokens: int
    expected_seconds: float
    expected_tokens: float

    def __str__(self) -> str:
        name, steps = "plain", max(1, self.steps)
        if self.plan is not None:
            search = f"{self.plan.shape.width}x{self.plan.shape.length}"
            name = f"{'lookup' if self.plan.from_text else search}:{self.plan.num_nodes}"
        return (
            f"{name}, {self.steps} steps: {self.tokens / steps:.2f} "
            f"({self.expected_tokens / steps:.2f}) tokens, {1e3 * self.seconds:.1f} "
            f"({1e3 * self.expected_seconds:.1f}) ms"
        )


@dataclass
class DecodingStats:
    """Counts over the steps of one request. A step is one verify whose outcome is read.

    The first token comes from the prefill and belongs to no step.

    Attributes:
        num_tokens: Tokens yielded, stop token included.
        accepted_counts: Number of steps by accepted drafts: at index a, those that accepted a.
        num_verified: Nodes verified in all steps, roots included.
        num_unmerged: Nodes as they would have been without merging of shared prefixes.
        shapes: Steps by kind, plain decoding first, once the sequence has ended; empty with a
            fixed plan.
    """

    num_tokens: int = 0
    accepted_counts: list[int] = field(default_factory=list)
    num_verified: int = 0
    num_unmerged: int = 0
    shapes: list[ShapeStats] = field(default_factory=list)

    def count_token(self) -> None:
        """Count one token."""
        self.num_tokens += 1

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
    def num_accepted(self) -> int:
        """Number of accepted drafts."""
        return sum(depth * count for depth, count in enumerate(self.accepted_counts))

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens yielded per step without the first token; None before the first step.

        Mean acceptance length in vLLM's terms.
        """
        steps = self.steps
        return (self.num_tokens - 1) / steps if steps else None

    @property
    def acceptance_rate_by_depth(self) -> list[float]:
        """At index d - 1, the share of steps that accepted at least d drafts."""
        counts = self.accepted_counts
        return [sum(counts[depth:]) / self.steps for depth in range(1, len(counts))]
