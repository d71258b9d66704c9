"""Draft size of a batch: one decision in every step, for all of its sequences.

A forward pass has one size for all sequences, and its cost grows with the rows of all of them, so
more sequences draft fewer tokens each. One `AdaptivePolicy` decides by means over all drafts.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence

import numpy as np

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.adaptive import AdaptivePolicy, Experience, PendingDrafts
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.policy.value import MEMORY
from mlx_redrafter.trees.tree import TokenTree


def batch_costs(costs: StepCosts, num_slots: int) -> StepCosts:
    """Estimate the costs of a batch's steps from those of one sequence.

    A pass over B trees of N nodes has as many rows as one over a tree of B N nodes. Beyond the
    largest timed size, extrapolate with the steepest slope from any smaller size to it: a device at
    its arithmetic's limit stays there, and the slope of the last two sizes alone is noise.
    Sequences draft one after the other, and the host waits for the drafts of each.

    Args:
        costs: Costs of one sequence's steps.
        num_slots: Number of sequences, B.
    """
    sizes, seconds = [1, *costs.verify], [costs.plain, *costs.verify.values()]
    last = sizes[-1], seconds[-1]
    before = zip(sizes[:-1], seconds[:-1], strict=True)
    slope = max(0.0, *((last[1] - cost) / (last[0] - size) for size, cost in before))

    def verify(num_rows: int) -> float:
        beyond = max(0, num_rows - sizes[-1])
        return float(np.interp(num_rows, sizes, seconds)) + slope * beyond

    return StepCosts(
        plain=verify(num_slots),
        verify={size: verify(num_slots * size) for size in costs.verify},
        first={width: num_slots * cost for width, cost in costs.first.items()},
        level={width: num_slots * cost for width, cost in costs.level.items()},
        wait=num_slots * costs.wait,
    )


class BatchPolicy:
    """The policy of a batch.

    Args:
        costs: Costs of one sequence's steps.
        num_slots: Function that returns the number of slots of the batch.
        batches: Experience by number of slots, which this policy keeps up to date.
        before: Experience of a sequence or batch before, for other numbers of slots.
        max_length: As in `AdaptivePolicy`.
    """

    def __init__(
        self,
        costs: StepCosts,
        num_slots: Callable[[], int],
        batches: MutableMapping[int, Experience],
        before: Experience | None = None,
        max_length: int | None = None,
    ):
        self._costs = costs
        self._num_slots = num_slots
        self._batches = batches
        self._max_length = max_length
        self._begin(before)
        self._plan: DraftPlan | None = None
        # Decisions so far, and the sequence whose steps are timed: the first to ask.
        self.num_decisions = 0
        self._timed: MemberPolicy | None = None

    def new_member(self) -> MemberPolicy:
        """Return the policy of one sequence."""
        return MemberPolicy(self)

    def choose(self, member: MemberPolicy) -> DraftPlan | None:
        """Return the plan of a sequence's next step; the first to ask has it decided for all."""
        if member.num_decisions == self.num_decisions:
            if self._size != self._num_slots():
                self._begin(self._policy.conclude())
            self._timed = member
            self._plan = self._policy.choose(None)
            self.num_decisions += 1
        member.num_decisions = self.num_decisions
        return self._plan

    def keep(self, member: MemberPolicy, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """Select the drafts of one sequence to verify."""
        return self._policy.keep_for(member.pending, plan, tree)

    def observe(self, member: MemberPolicy, step: Step) -> None:
        """Learn from a sequence's tokens, and from the cost of one sequence's steps."""
        if member is self._timed:
            self._policy.observe_time(step)
        self._policy.observe_tokens(member.pending, step.tokens)

    def _begin(self, before: Experience | None) -> None:
        """Decide by the costs of the present number of slots."""
        self._size = self._num_slots()
        slots = max(1, self._size)
        begin = self._batches.get(self._size)
        if begin is None and before is not None:
            begin = before.without_times()
        costs = batch_costs(self._costs, slots)
        self._policy = AdaptivePolicy(costs, begin, max_length=self._max_length)
        experience = self._batches[self._size] = self._policy.experience
        experience.drafts.window = MEMORY * slots
        self._timed = None


class MemberPolicy:
    """A `DraftPolicy` of one sequence, which does what is decided for all.

    Attributes:
        num_decisions: Decisions of the batch that the sequence has followed.
        pending: Its drafts that the policy still learns from.
    """

    def __init__(self, batch: BatchPolicy):
        self._batch = batch
        self.num_decisions = batch.num_decisions
        self.pending = PendingDrafts()

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        return self._batch.choose(self)

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        return self._batch.keep(self, plan, tree)

    def observe(self, step: Step) -> None:
        self._batch.observe(self, step)
