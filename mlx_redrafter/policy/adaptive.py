"""Choose in every step the draft plan with the most expected tokens per second.

A step yields one token and its accepted drafts. `calibration` estimates those, `plans` the costs;
plain decoding is one of the plans. `state` updates these estimates. A guard compares measured costs
with plain decoding, and stops drafting whatever is estimated. A budget pays for exploration, steps
that show what the best choice does not:

- shadow drafts, which are drawn next to a plain step, scored and not verified;
- larger drafts, one length longer or one width wider, of which as many are verified;
- a switch: plain steps while drafting, or drafted steps while decoding plainly.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Any

import numpy as np

from mlx_redrafter.decoding.delivery import ShapeStats
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.calibration import ScoredDrafts, most_probable
from mlx_redrafter.policy.plans import (
    COUNTS,
    EMPTY,
    LOOKUP,
    PLACES,
    PLANS,
    SIZES,
    Choice,
    CurrentCosts,
    Floats,
    StepCosts,
)
from mlx_redrafter.policy.state import Budget, Learner, PolicyState
from mlx_redrafter.trees.tree import Drafts, TokenTree

# Share by which drafting must seem faster than plain decoding: both are estimates.
MARGIN = 0.03
# Number of steps of a switch: a plain step is timed if plain ones come before and after it.
SWITCH = 3
# Number of plain steps that a batch begins with if its costs are estimates.
FIRST = 6
# Drafts of a sequence that the policy still learns from, and its newest ones.
Candidates = tuple[list[ScoredDrafts], TokenTree]


class Explorer:
    """Chooses in every step between the best choice and exploration."""

    def __init__(self, costs: CurrentCosts, budget: Budget):
        self._costs = costs
        self._budget = budget
        self._best = Choice()
        # Shadow or larger drafts, a step of a switch, and the cost of either in seconds.
        self._further, self._further_cost = Choice(), math.inf
        self._untried, self._switch_cost = Choice(), math.inf
        # The steps of a switch that are left, all alike.
        self._switch: list[Choice] = []

    def prepare(self, best: Choice, drafted: Choice, fixed: Choice, all_tokens: Floats) -> None:
        """Find what explores next to the best choice.

        ``drafted`` is the best one with drafts, and ``fixed`` the best one with a fixed number of
        nodes. ``all_tokens`` has the expected tokens of every plan, shape (W, L, 1 + S).
        """
        costs, self._best = self._costs, best
        if best.plan is None:
            assert drafted.plan is not None
            self._further = Choice(replace(drafted.plan, num_nodes=1), 1)
            w, n = PLACES[drafted.plan.shape]
            self._further_cost = float(costs.step[w, n, 0]) - costs.plain
            self._untried, loss = fixed, fixed.seconds - fixed.tokens * costs.plain
        else:
            self._further, self._further_cost = self._larger(best, all_tokens)
            self._untried, loss = Choice(), costs.plain - 1 / best.rate
        # An expected gain may be wrong, so each step of a switch costs something.
        self._switch_cost = SWITCH * max(loss, 3 * MARGIN * costs.plain)

    def choose(self, allows_drafts: bool) -> Choice:
        """Return the best choice, or now and then one that shows more, if the guard allows it."""
        if allows_drafts and not self._switch and self._budget.pay_switch(self._switch_cost):
            self._switch = SWITCH * [self._untried]
        if self._switch and (allows_drafts or self._switch[-1].plan is None):
            return self._switch.pop()
        is_larger = self._best.plan is not None
        if is_larger and not allows_drafts:
            return Choice()
        is_paid = self._budget.pay_drafts(self._further_cost, is_larger)
        return self._further if is_paid else self._best

    @property
    def is_plain(self) -> bool:
        """Whether the next step is a plain one of a switch."""
        return bool(self._switch) and self._switch[-1].plan is None

    def begin_plain(self) -> None:
        """Begin with some plain steps, of which the costs of all steps are learned."""
        self._switch = FIRST * [Choice()]

    def stop_switch(self) -> None:
        """Give up the switch that is under way, if there is one."""
        self._switch = []

    def _larger(self, best: Choice, all_tokens: Floats) -> tuple[Choice, float]:
        """Return the best choice with longer and wider drafts in turns, and its further cost."""
        assert best.plan is not None
        (w, n), costs = PLACES[best.plan.shape], self._costs
        wider = (w, n + 1), (w + 1, n)
        further = [place for place in wider if place in PLANS and costs.offered[place]]
        if not further:
            return best, math.inf
        place = further[self._budget.num_larger % len(further)]
        cost = costs.step[place][0] - costs.step[w, n, 0]
        if best.num_nodes is not None:  # what its first nodes are expected to yield less
            size = *place, COUNTS.index(best.num_nodes - 1)
            cost = max(cost, costs.step[size] - all_tokens[size] / best.rate)
        return best._replace(plan=PLANS[place]), float(cost)


class Planner:
    """Chooses for sequences that share their steps: a lone one, or all of a batch.

    It updates the state. ``timed`` has the seconds of steps as timed beforehand. ``clock`` returns
    the time in seconds, to limit the host's learning. ``max_length`` is that of the longest beams
    that the proposer can draft; None if it has no bound.
    """

    def __init__(
        self,
        timed: StepCosts,
        state: PolicyState,
        clock: Callable[[], float] = time.perf_counter,
        max_length: int | None = None,
    ):
        self.state = state
        self._timed = timed
        self._costs = CurrentCosts(timed, max_length)
        self.learner = Learner(self._costs, state)
        self.explorer = Explorer(self._costs, state.budget)
        self._clock = clock
        # Choices whose steps have not been observed, at most two, and the newest one. A batch
        # observes no step of a sequence that has ended.
        self._in_flight: deque[Choice] = deque(maxlen=2)
        self.newest = Choice()
        self._best = self._find_best()

    @property
    def least_chance(self) -> float:
        """Half of the mean probability that the drafts of a lookup need to pay.

        Above 1 while the guard stops them, or while they have cost the host more time than they
        may. A less probable draft may be worth a place in a tree that is verified anyway, but tells
        nothing of whether to verify one.
        """
        may_look_up = self.learner.guard.allows_drafts and self.state.budget.lookups >= 0
        return self._least_chance if may_look_up else math.inf

    def choose(
        self, matches: Sequence[Sequence[float]], count: int, seconds: float = 0.0
    ) -> Choice:
        """Choose the plan of the next step of ``count`` sequences.

        ``matches`` has the probabilities of the drafts of each prompt lookup that finds something,
        and ``seconds`` is the time that all took, which is paid for unless they are chosen.
        """
        if self.learner.outcomes:
            self.learn()
        looks_up = matches and not self.explorer.is_plain
        lookup = self._look_up(matches, count) if looks_up else None
        if lookup is None:
            self.state.budget.pay_lookups(seconds)
        self.newest = lookup or self.explorer.choose(self.learner.guard.allows_drafts)
        self._in_flight.append(self.newest)
        return self.newest

    def select(
        self, candidates: Sequence[Candidates], count: int, is_early: bool = False
    ) -> list[TokenTree]:
        """Select the drafts to verify, with padding if a larger size costs less.

        ``candidates`` are those of the newest plan for each of ``count`` sequences that has any,
        and ``is_early`` is whether the step before has not been observed.
        """
        kept = self._select(candidates, count, is_early)
        size = max(tree.size for tree in kept)
        size = size if size == 1 else self._timed.cheapest_size(size)
        return [tree if tree.size == 1 else tree.padded(size) for tree in kept]

    def observe_time(self, step: Step, num_tokens: float, least: float) -> None:
        """Learn from the cost of a step; the arguments are those of `Learner.observe_time`."""
        # The last step of a sequence is observed without having been chosen.
        choice = self._in_flight.popleft() if self._in_flight else Choice()
        in_row = self.newest.plan is None
        self.learner.observe_time(step, choice, num_tokens, least, in_row)

    def learn(self) -> None:
        """Learn from the drafts of all steps since the last time, and decide again."""
        start = self._clock()
        if self.learner.learn(self._best.rate):
            self._best = self._find_best()
            self.state.budget.pay_learning(self._clock() - start)

    def _select(
        self, candidates: Sequence[Candidates], count: int, is_early: bool
    ) -> list[TokenTree]:
        choice, calibration = self.newest, self.state.calibration
        plan, wanted, trees = choice.plan, choice.num_nodes, [tree for _, tree in candidates]
        among: list[Drafts | None] = [None] * len(trees)
        assert plan is not None
        if plan.from_text:
            probabilities = [[math.exp(score) for score in tree.read().scores] for tree in trees]
        else:
            for drafts, tree in candidates:
                drafts.append(ScoredDrafts(plan.searched, tree, is_early))
            if wanted != 1 and not self.learner.guard.allows_drafts:
                # The step in flight when this one was chosen has cost too much.
                wanted = 1
                self.explorer.stop_switch()
                self._revise(tokens=1.0)
            if wanted is not None:
                most = min(wanted, *(tree.size for tree in trees))
                size = max(size for size in (1, *self._timed.verify) if size <= most)
                return [tree.first(size) for tree in trees]
            scored = [drafts[-1] for drafts, _ in candidates]
            probabilities = [one.score(calibration) for one in scored]
            if count == 1:  # the host has no time for the others of a batch
                among[0], probabilities[0] = scored[0].with_others()
        _, tokens, kept = self._worth(probabilities, count, plan.from_text)
        self._revise(tokens=tokens, waits=True)
        return [
            tree.subtree(drafts, all_drafts)
            for tree, drafts, all_drafts in zip(trees, kept, among, strict=True)
        ]

    def _revise(self, **changes: Any) -> None:
        """Change the newest choice, whose step has not been observed yet."""
        self.newest = self.newest._replace(**changes)
        if self._in_flight:
            self._in_flight[-1] = self.newest

    def _find_best(self) -> Choice:
        """Find the best choice by the current estimates, and what explores next to it."""
        costs, expected = self._costs, self.state.drafts
        costs.update(self.state.ratios, self.state.evenness.share(from_text=False))
        # A fixed number of nodes: the host is ahead of the device.
        all_tokens = 1 + expected.mean
        w, n, size = place = _largest(all_tokens[..., 1:] / costs.step[..., 1:])
        tokens, seconds = all_tokens[..., 1:][place], costs.step[..., 1:][place]
        fixed = Choice(PLANS[w, n], SIZES[size], float(tokens), float(seconds))
        # As many nodes as pay, once the host knows the drafts.
        drafts, relative = expected.chosen
        cost = relative * costs.waiting[..., 1]
        w, n = place = _largest((1 + drafts) / cost * costs.offered)
        waiting = Choice(PLANS[w, n], None, 1 + float(drafts[place]), float(cost[place]))
        drafted = max(fixed, waiting, key=lambda choice: choice.rate)
        plain = Choice(seconds=costs.plain / (1 + MARGIN))
        best = max(plain, drafted, key=lambda choice: choice.rate)
        loss = self._loss_of_empty(best.rate) - 1
        needed = zip(COUNTS[1:], self._verify(from_text=True)[1:], strict=True)
        self._least_chance = min((best.rate * cost + loss) / count for count, cost in needed) / 2
        self.explorer.prepare(best, drafted, fixed, all_tokens)
        return best

    def _look_up(self, matches: Sequence[Sequence[float]], count: int) -> Choice | None:
        """Choose a prompt lookup if that gains more than an unaccepted one loses."""
        if not self.learner.guard.allows_drafts:
            return None
        rate, plain = self._best.rate, self._costs.plain
        least = self._loss_of_empty(rate)
        # No verify costs less than a plain step.
        if 1 + sum(map(sum, matches)) / count - rate * plain <= least:
            return None
        surplus, tokens, _ = self._worth(matches, count, from_text=True)
        return Choice(LOOKUP, tokens=tokens) if surplus > least else None

    def _loss_of_empty(self, rate: float) -> float:
        """Return the tokens that a lookup of which nothing is accepted loses at a rate."""
        empty = self._timed.plain * self.state.ratios.of(EMPTY)
        return rate * max(self._timed.wait, empty - self._costs.plain)

    def _verify(self, from_text: bool) -> list[float]:
        """Return costs by entry of COUNTS for as many tokens as the slowest sequence has."""
        share, (none, *verify) = self.state.evenness.share(from_text), self._costs.verify
        return [none, *(cost / share for cost in verify)]

    def _worth(
        self, candidates: Sequence[Sequence[float]], count: int, from_text: bool
    ) -> tuple[float, float, list[list[int]]]:
        """Find the number of drafts with the most tokens beyond what their time yields otherwise.

        All sequences pay for the size of the largest tree, so it is one number for all of them.
        ``candidates`` has the probability of each draft that it is accepted, for each of ``count``
        sequences with any. Return the tokens per sequence beyond those, the expected tokens per
        sequence, and the drafts of each sequence with drafts.
        """
        rate, orders = self._best.rate, [most_probable(one) for one in candidates]
        ordered = ([one[i] for i in order] for one, order in zip(candidates, orders, strict=True))
        added = (sum(chances) / count for chances in zip_longest(*ordered, fillvalue=0.0))
        sums = list(accumulate(added, initial=1.0))
        options = zip(COUNTS, self._verify(from_text), strict=True)
        surplus = [sums[number] - rate * cost for number, cost in options if number < len(sums)]
        most = max(surplus)
        best = COUNTS[surplus.index(most)]
        return most, sums[best], [order[:best] for order in orders]


def _largest(values: Floats) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(int(values.argmax()), values.shape))


class AdaptivePolicy:
    """A `DraftPolicy` that learns, with the estimates of the sequence before; see `Planner`."""

    reads_drafts = True
    least_chance = 0.0  # one text's lookup costs the host little; all drafts are counted

    def __init__(
        self,
        costs: StepCosts,
        before: PolicyState | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_length: int | None = None,
    ):
        # Called at the first step: a text that joins a batch at once never makes one here.
        self._begin = lambda: Planner(
            costs, PolicyState() if before is None else before.for_next(), clock, max_length
        )
        # Its drafts that are still learned from.
        self._drafts: list[ScoredDrafts] = []

    @cached_property
    def _planner(self) -> Planner:
        return self._begin()

    @property
    def state(self) -> PolicyState:
        return self._planner.state

    @property
    def is_used(self) -> bool:
        """Whether this policy has observed a step."""
        return "_planner" in vars(self) and bool(self._planner.learner.totals)

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
        num_tokens = len(step.tokens)
        self._planner.observe_time(step, num_tokens, num_tokens)
        self._planner.learner.observe_tokens(self._drafts, step.tokens)

    def conclude(self) -> PolicyState:
        """End the sequence and return its estimates."""
        self._planner.learn()
        return self.state

    def shapes(self) -> list[ShapeStats]:
        return self._planner.learner.shapes()
