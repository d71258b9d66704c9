"""Draft size of a batch: one decision in every step, for all of its sequences.

A forward pass has one size for all sequences, and its cost grows with the rows of all of them, so
more sequences draft fewer tokens each. One `Planner` decides by means over all drafts, and by the
probabilities of all drafts once they are known. Drafts must pay for the slowest sequence, too:
a batch ends with that one, and no sequence is to be slower than in plain decoding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from mlx_redrafter.decoding.protocols import AllMatches, DraftPolicy, Step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.adaptive import AdaptivePolicy, Planner
from mlx_redrafter.policy.calibration import MEMORY, ScoredDrafts
from mlx_redrafter.policy.plans import SIZES, FixedPolicy, StepCosts
from mlx_redrafter.policy.state import PolicyState
from mlx_redrafter.trees.tree import TokenTree

# Numbers of nodes whose steps are timed.
TIMED = (1, *SIZES)
# Maximum number of rows of a pass with drafts, as costs far beyond the timed ones are unknown.
MOST_ROWS = 128


def batch_costs(costs: StepCosts, num_slots: int, is_joint: bool = False) -> StepCosts:
    """Estimate the costs of a batch's steps from those of one sequence.

    A pass over B trees of N nodes has as many rows as one over a tree of B N nodes. Beyond the
    largest timed size, extrapolate with the steepest slope from any smaller size to it: a device at
    its arithmetic's limit stays there, and the slope of the last two sizes alone is noise.
    The same holds for drafts, whose network has B W rows for W beams of each sequence, if it
    ``is_joint``. Otherwise the sequences draft one after the other.
    """
    sizes, seconds = [1, *costs.verify], [costs.plain, *costs.verify.values()]
    last = sizes[-1], seconds[-1]
    before = zip(sizes[:-1], seconds[:-1], strict=True)
    slope = max(0.0, *((last[1] - cost) / (last[0] - size) for size, cost in before))

    def verify(num_rows: int) -> float:
        beyond = max(0, num_rows - sizes[-1])
        return float(np.interp(num_rows, sizes, seconds)) + slope * beyond

    def drafting(seconds: Mapping[int, float]) -> dict[int, float]:
        """Extrapolate from the widths that were timed to as many rows, or add up all sequences."""
        if not is_joint or not seconds:
            return {width: num_slots * cost for width, cost in seconds.items()}
        (low, least), (high, most) = min(seconds.items()), max(seconds.items())
        further = (num_slots - 1) * max(0.0, most - least) / max(1, high - low)
        return {
            width: min(cost + width * further, num_slots * cost) for width, cost in seconds.items()
        }

    return StepCosts(
        plain=verify(num_slots),
        verify={n: verify(num_slots * n) for n in costs.verify if num_slots * n <= MOST_ROWS},
        first=drafting(costs.first),
        level=drafting(costs.level),
        wait=costs.wait,  # the drafts of all sequences are dispatched before the first is read
    )


@dataclass(eq=False)
class BatchPolicy:
    """The policy of a batch, a `JointPolicy`.

    ``costs`` and ``num_slots`` return the costs of one sequence's steps, and the number of slots of
    the batch. ``before`` returns the estimates of a sequence before, for new numbers of slots. The
    policy keeps ``batches`` up to date, which are the estimates by number of slots. The step that
    is being decided has a ``plan``, ``count`` sequences, and the ``selected`` drafts of members.
    """

    costs: Callable[[], StepCosts]
    num_slots: Callable[[], int]
    batches: MutableMapping[int, PolicyState]
    before: Callable[[], PolicyState | None] = lambda: None
    max_length: int | None = None
    is_joint: bool = False

    def __post_init__(self) -> None:
        self._planner: Planner | None = None
        # Number of slots that it decides for.
        self._size = 0
        # Steps of the members that the host has read since the last decision.
        self._steps: list[tuple[MemberPolicy, Step]] = []
        self.plan: DraftPlan | None = None
        self.count = 1
        self.selected: dict[MemberPolicy, TokenTree] = {}

    @property
    def least_chance(self) -> float:
        """Probability of `DraftPolicy.least_chance`, by the planner of the step before."""
        return 0.0 if self._planner is None else self._planner.least_chance

    def join(self, policy: DraftPolicy | None) -> DraftPolicy | None:
        """Replace a policy that rests on the step times of a lone sequence."""
        if isinstance(policy, AdaptivePolicy):
            return MemberPolicy(self)
        return FixedPolicy(policy.plan) if isinstance(policy, FixedPolicy) else policy

    def choose_all(self, found: AllMatches, count: int, seconds: float) -> None:
        """Decide the plan of the next step for all members."""
        members = [matches for one, matches in found if isinstance(one, MemberPolicy)]
        self.selected = {}
        self._learn_time()
        if members:
            self.count = count
            self.plan = self.current().choose([one for one in members if one], count, seconds).plan

    def select_all(self, trees: Sequence[tuple[DraftPolicy, TokenTree]]) -> None:
        """Select the drafts of all members to verify."""
        found = {one: tree for one, tree in trees if isinstance(one, MemberPolicy)}
        self._learn_time()
        if found:
            drafts = [(member.drafts, tree) for member, tree in found.items()]
            selected = self.current().select(drafts, self.count)
            self.selected = dict(zip(found, selected, strict=True))

    def observe(self, member: MemberPolicy, step: Step) -> None:
        """Note a step of a member that was chosen for it."""
        self._steps.append((member, step))

    def current(self) -> Planner:
        """Return the planner for the present number of slots."""
        size = max(1, self.num_slots())
        if self._planner is None or self._size != size:
            self._planner, self._size, self._steps = self._begin(size), size, []
        return self._planner

    def _begin(self, size: int) -> Planner:
        """Begin to plan for a number of slots with what is known of it, or of another one."""
        before = self._planner
        if before is not None:
            before.learn()
        begin = self.batches.get(size)
        if begin is None:
            begin = before.state if before is not None else self.before() or PolicyState()
            begin = begin.without_times()
        is_timed = begin.guard is not None  # in this process
        state = self.batches[size] = begin.for_next()
        state.drafts.average_over(MEMORY * size)
        costs = batch_costs(self.costs(), size, self.is_joint)
        planner = Planner(costs, state, max_length=self.max_length)
        if not is_timed:  # plain steps are timed before drafts are trusted
            planner.explorer.begin_plain()
        if before is not None:  # for the sequences that are left
            planner.learner.guard.take_over(before.learner.guard)
        return planner

    def _learn_time(self) -> None:
        """Learn from the cost of a step, once the host has read the tokens of its sequences.

        A sequence whose drafts are good or bad must not stand for all of them. The guard counts the
        tokens that the slowest one has over all steps with a network's drafts, or a lookup's.
        """
        steps, self._steps = self._steps, []
        if steps and self._planner is not None:
            largest = max([step for _, step in steps], key=attrgetter("num_nodes"))
            num_tokens = sum([len(step.tokens) for _, step in steps]) / len(steps)
            least = 1.0
            if largest.plan is not None:
                kind = largest.plan.from_text
                least = min([member.ahead[kind] + len(step.tokens) for member, step in steps])
                for member, step in steps:
                    member.ahead[kind] += len(step.tokens) - least
            # Texts of a batch may have fewer drafts than the best number, which was timed.
            size = TIMED[bisect_left(TIMED, largest.num_nodes)]
            self._planner.observe_time(largest._replace(num_nodes=size), num_tokens, least)


class MemberPolicy:
    """A `DraftPolicy` of one sequence, which does what is decided for all.

    It still learns from its ``drafts``. ``ahead`` are the numbers of its tokens beyond those that
    the guard has counted, in steps with the drafts of a network and of a lookup.
    """

    reads_drafts = True

    def __init__(self, batch: BatchPolicy):
        self._batch = batch
        self.drafts: list[ScoredDrafts] = []
        self.ahead = [0.0, 0.0]
        # Number of decisions whose steps have not been observed.
        self._num_chosen = 0

    @property
    def least_chance(self) -> float:
        return self._batch.least_chance

    def choose(self, matches: Sequence[float] | None) -> DraftPlan | None:
        self._num_chosen += 1
        plan = self._batch.plan
        has_nothing = plan is not None and plan.from_text and not matches
        return None if has_nothing else plan

    def select(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        batch = self._batch
        if self in batch.selected:
            return batch.selected[self]
        (selected,) = batch.current().select([(self.drafts, tree)], batch.count)  # shadow drafts
        return selected

    def select_early(self, plan: DraftPlan, tree: TokenTree) -> None:
        """Leave the choice to `select`: the cache of a batch must know the outcome."""

    def observe(self, step: Step) -> None:
        if self._num_chosen:  # the last step of a sequence is observed without having been chosen
            self._num_chosen -= 1
            self._batch.observe(self, step)
        if self.drafts:
            self._batch.current().learner.observe_tokens(self.drafts, step.tokens)
