"""The default policy of a lone sequence: `planner` chooses, and no text depends on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.decoding.stats import ShapeStats
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.planner import Planner
from mlx_redrafter.policy.scored_drafts import ScoredDrafts
from mlx_redrafter.policy.state import PolicyState
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.trees.tree import TokenTree


class AdaptivePolicy:
    """A `DraftPolicy` that learns.

    Args:
        costs: Seconds of steps, as timed beforehand.
        before: Estimates of the previous sequence.
        clock: Function that returns the time in seconds, to limit the host's learning.
        max_length: Longest beams that the proposer can draft; None if it has no bound.
    """

    reads_drafts = True

    def __init__(
        self,
        costs: StepCosts,
        before: PolicyState | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_length: int | None = None,
    ):
        state = PolicyState() if before is None else before.for_next()
        self._planner = Planner(costs, state, clock, max_length)
        # Its drafts that are still learned from.
        self._drafts: list[ScoredDrafts] = []

    @property
    def state(self) -> PolicyState:
        """Estimates so far."""
        return self._planner.state

    @property
    def is_used(self) -> bool:
        """Whether this policy has observed a step."""
        return self._planner.learner.has_steps

    @property
    def waits(self) -> bool:
        """Whether the host waited for the drafts of the last step before it verified them."""
        return self._planner.newest.waits

    def choose(self, matches: Sequence[float] | None = None) -> DraftPlan | None:
        return self._planner.choose([matches] if matches else [], 1).plan

    def select(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        return self._planner.select([(self._drafts, tree)], 1)[0]

    def select_early(self, plan: DraftPlan, tree: TokenTree) -> TokenTree | None:
        if plan.from_text or self._planner.newest.num_nodes is None:
            return None
        return self._planner.select([(self._drafts, tree)], 1, is_early=True)[0]

    def observe(self, step: Step) -> None:
        self._planner.observe_time(step, len(step.tokens))
        self._planner.learner.observe_tokens(self._drafts, step.tokens)

    def conclude(self) -> PolicyState:
        """End the sequence and return its estimates."""
        self._planner.learn()
        return self.state

    def shapes(self) -> list[ShapeStats]:
        """Return the statistics of every kind of step: plain ones first, then by shape."""
        return self._planner.learner.shapes()
