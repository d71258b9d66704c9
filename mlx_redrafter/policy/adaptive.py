"""Choose in every step the draft plan with the most expected tokens per second.

A step yields one token and its accepted drafts. `acceptance` and `value` estimate those,
`step_times` the costs; plain decoding is one of the plans. A budget, a share of the time, pays for
what the plans in use do not show:

- a probe: drafts that are drawn next to a plain step, scored and not verified;
- a survey: drafts one length longer or one width wider, of which as many are verified;
- a trial: plain steps while drafting, or drafted steps while decoding plainly.

A guard compares measured costs with plain decoding, and stops drafting whatever is estimated.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from operator import add
from typing import Any, NamedTuple

import numpy as np

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.decoding.stats import ShapeStats
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.acceptance import Acceptance, ScoredDrafts, most_probable
from mlx_redrafter.policy.plans import COUNTS, LOOKUP, PLACES, PLANS, SIZES, Floats
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.policy.step_times import EMPTY, PROBE, SPARE, CurrentCosts, Guard, TimeRatios
from mlx_redrafter.policy.value import ExpectedDrafts
from mlx_redrafter.trees.tree import TokenTree

# Share of the time for exploring, half for probes and surveys and half for trials.
EXPLORE = 0.01
# Share of the time for learning on the host; the cost of one plain step is lent.
LEARNING = 0.02
# Share by which drafting must seem faster than plain decoding: both are estimates.
MARGIN = 0.03
# Number of steps of a trial: a plain step is timed if plain ones come before and after it.
TRIAL = 3

# Drafts of a sequence that the policy still learns from, and its newest ones.
Offered = tuple[list[ScoredDrafts], TokenTree]
# Totals of a kind of step before its first one.
_NONE = (0.0,) * 5


@dataclass
class Experience:
    """Estimates that one sequence hands to the next.

    Attributes:
        probes: Seconds saved for probes and surveys.
        trials: Seconds saved for trials.
        learning: Seconds saved for learning on the host.
        num_surveys: Number of surveys so far.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    drafts: ExpectedDrafts = field(default_factory=ExpectedDrafts)
    ratios: TimeRatios = field(default_factory=TimeRatios)
    guard: Guard | None = None
    probes: float = 0.0
    trials: float = 0.0
    learning: float = 0.0
    num_surveys: int = 0

    def save(self, seconds: float, most: float) -> None:
        """Save shares of a step's cost, up to ``most`` seconds for each purpose."""
        self.probes = min(most, self.probes + EXPLORE / 2 * seconds)
        self.trials = min(most, self.trials + EXPLORE / 2 * seconds)
        self.learning = min(most, self.learning + LEARNING * seconds)

    def for_next(self) -> Experience:
        """Return a copy for the next sequence, in which counts weigh half."""
        following = deepcopy(self)
        following.drafts.fade()
        following.ratios.fade()
        if following.guard is not None:
            following.guard.fade()
        return following

    def without_times(self) -> Experience:
        """Return a copy for steps whose costs are others."""
        return replace(deepcopy(self), ratios=TimeRatios(), guard=None)


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


class AdaptivePolicy:
    """A `DraftPolicy` that learns; no text depends on what it decides.

    Args:
        costs: Seconds of steps, as timed beforehand.
        before: Experience of the previous sequence.
        clock: Function that returns the time in seconds, to limit the host's learning.
        max_length: Longest beams that the proposer can draft; None if it has no bound.

    Attributes:
        experience: Experience of this sequence so far.
    """

    reads_drafts = True

    def __init__(
        self,
        costs: StepCosts,
        before: Experience | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_length: int | None = None,
    ):
        self.experience = Experience() if before is None else before.for_next()
        self._timed = costs
        self._costs = CurrentCosts(costs, max_length)
        self._costs.update(self.experience.ratios)
        self._guard = self.experience.guard = self.experience.guard or Guard(self._costs.plain)
        # The steps of a trial that are left, all alike.
        self._trial: list[Choice] = []
        # Choices whose steps have not been observed, at most two, and the newest one. A batch
        # observes no step of a sequence that has ended.
        self._in_flight: deque[Choice] = deque(maxlen=2)
        self._newest = Choice()
        self._pending: list[ScoredDrafts] = []
        # Drafts to learn from.
        self._outcomes: list[list[ScoredDrafts]] = []
        self._was_plain = False
        self._clock = clock
        # Steps, tokens, expected tokens, seconds and expected seconds by kind of step.
        self._totals: dict[tuple[DraftPlan | None, int], list[float]] = {}
        self._decide()

    @property
    def is_used(self) -> bool:
        """Whether this policy has observed a step."""
        return bool(self._totals)

    @property
    def waits(self) -> bool:
        """Whether the host waited for the drafts of the last step before it verified them."""
        return self._newest.waits

    def choose(self, outlook: Sequence[float] | None = None) -> DraftPlan | None:
        return self.choose_for([outlook] if outlook else [], 1)

    def choose_for(self, outlooks: Sequence[Sequence[float]], count: int) -> DraftPlan | None:
        """Choose the plan of the next step of several sequences.

        Args:
            outlooks: Outlooks of the sequences for which a prompt lookup finds something.
            count: Number of all sequences.
        """
        if self._outcomes:
            self._learn()
        lookup = self._look_up(outlooks, count) if outlooks else None
        self._newest = lookup or self._explore()
        self._in_flight.append(self._newest)
        return self._newest.plan

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        (kept,) = self.keep_all([(self._pending, tree)], 1)
        return kept

    def keep_early(self, plan: DraftPlan, tree: TokenTree) -> TokenTree | None:
        if plan.from_text or self._newest.num_nodes is None:
            return None
        kept = self.keep(plan, tree)
        self._pending[-1].is_early = True
        return kept

    def keep_all(self, offers: Sequence[Offered], count: int) -> list[TokenTree]:
        """Select the drafts to verify, with padding if a larger size costs less.

        Args:
            offers: Drafts of the newest plan for each sequence that has any.
            count: Number of all sequences.
        """
        kept = self._select(offers, count)
        size = max(tree.size for tree in kept)
        size = size if size == 1 else self._timed.cheapest_size(size)
        return [tree if tree.size == 1 else tree.padded(size) for tree in kept]

    def _select(self, offers: Sequence[Offered], count: int) -> list[TokenTree]:
        choice, acceptance = self._newest, self.experience.acceptance
        plan, wanted, trees = choice.plan, choice.num_nodes, [tree for _, tree in offers]
        assert plan is not None
        if plan.from_text:
            probabilities = [[math.exp(score) for score in tree.read().scores] for tree in trees]
        else:
            for pending, tree in offers:
                pending.append(ScoredDrafts(plan.searched, tree))
            if wanted != 1 and not self._guard.allows_drafts:
                # The step in flight when this one was chosen has cost too much.
                wanted, self._trial = 1, []
                self._revise(tokens=1.0)
            if wanted is not None:
                most = min(wanted, *(tree.size for tree in trees))
                size = max(size for size in (1, *self._timed.verify) if size <= most)
                return [tree.first(size) for tree in trees]
            probabilities = [pending[-1].score(acceptance) for pending, _ in offers]
        _, tokens, kept = self._worth(probabilities, count)
        self._revise(tokens=tokens, waits=True)
        return [tree.subtree(drafts) for tree, drafts in zip(trees, kept, strict=True)]

    def _revise(self, **changes: Any) -> None:
        """Change the newest choice, whose step has not been observed yet."""
        self._newest = self._newest._replace(**changes)
        if self._in_flight:
            self._in_flight[-1] = self._newest

    def observe(self, step: Step) -> None:
        self.observe_time(step, len(step.tokens))
        self.observe_tokens(self._pending, step.tokens)

    def observe_time(self, step: Step, num_tokens: float) -> None:
        """Learn from the cost of a step, at once: `keep` of the next one depends on it.

        Args:
            step: The step.
            num_tokens: Its tokens; their mean over the sequences of a batch.
        """
        # The last step of a sequence is observed without having been chosen.
        choice = self._in_flight.popleft() if self._in_flight else Choice()
        plan, kind, experience = step.plan, step.num_nodes, self.experience
        timed = self._costs.timed(plan, kind, choice.waits)
        if plan is not None and kind == 1:
            kind = EMPTY if plan.from_text else PROBE
        expected = timed * experience.ratios.of(kind)
        seconds = expected if step.seconds is None else step.seconds
        key, news = (plan, step.num_nodes), (1, num_tokens, choice.tokens, seconds, expected)
        self._totals[key] = list(map(add, self._totals.get(key, _NONE), news))
        self._guard.count(num_tokens)
        was_plain, self._was_plain = self._was_plain, plan is None
        if step.seconds is None:
            return
        experience.save(seconds, SPARE * self._costs.plain)
        if plan is not None:
            experience.ratios.learn(kind, seconds / timed)
            self._guard.learn_drafted(seconds, num_tokens)
        elif was_plain and self._newest.plan is None:
            # A plain step is dispatched before the one before is read: in a row of them the first
            # seems longer and the last shorter than they are.
            experience.ratios.learn(kind, seconds / timed)
            self._guard.learn_plain(seconds)

    def observe_tokens(self, pending: list[ScoredDrafts], tokens: Sequence[int]) -> None:
        """Store the tokens of a sequence's step; `choose` learns while the device is busy."""
        for scored in pending:
            if not scored.is_early:
                scored.following.extend(tokens)
            scored.is_early = False
        if pending:
            self._outcomes.append(pending)

    def conclude(self) -> Experience:
        """End the sequence and return its experience."""
        self._learn()
        return self.experience

    def shapes(self) -> list[ShapeStats]:
        """Return the statistics of every kind of step: plain ones first, then by shape."""
        plain = self._costs.plain
        found = [] if (None, 1) in self._totals else [ShapeStats(None, plain, 0, 0, plain, 0.0)]
        for (plan, num_nodes), total in sorted(self._totals.items(), key=_place_of_kind):
            steps, tokens, expected, seconds, expected_seconds = total
            kind = None if plan is None else replace(plan, num_nodes=num_nodes)
            means = seconds / steps, int(steps), int(tokens), expected_seconds / steps
            found.append(ShapeStats(kind, *means, expected))
        return found

    def _decide(self) -> None:
        """Find the best choice by the current estimates, and what explores next to it."""
        costs, expected = self._costs, self.experience.drafts
        costs.update(self.experience.ratios)
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
        best = self._best = max(plain, drafted, key=lambda choice: choice.rate)
        if best.plan is None:
            assert drafted.plan is not None
            self._further = Choice(replace(drafted.plan, num_nodes=1), 1)
            w, n = PLACES[drafted.plan.shape]
            self._further_cost = float(costs.step[w, n, 0]) - costs.plain
            self._untried, loss = fixed, fixed.seconds - fixed.tokens * costs.plain
        else:
            self._further, self._further_cost = self._survey(best, all_tokens)
            self._untried, loss = Choice(), costs.plain - 1 / best.rate
        # An expected gain may be wrong, so each step of a trial costs something.
        self._trial_cost = TRIAL * max(loss, 3 * MARGIN * costs.plain)

    def _survey(self, best: Choice, all_tokens: Floats) -> tuple[Choice, float]:
        """Return the best choice with longer and wider drafts in turns, and its further cost."""
        assert best.plan is not None
        (w, n), costs = PLACES[best.plan.shape], self._costs
        wider = (w, n + 1), (w + 1, n)
        further = [place for place in wider if place in PLANS and costs.offered[place]]
        if not further:
            return best, math.inf
        place = further[self.experience.num_surveys % len(further)]
        cost = costs.step[place][0] - costs.step[w, n, 0]
        if best.num_nodes is not None:  # what its first nodes are expected to yield less
            size = *place, COUNTS.index(best.num_nodes - 1)
            cost = max(cost, costs.step[size] - all_tokens[size] / best.rate)
        return best._replace(plan=PLANS[place]), float(cost)

    def _explore(self) -> Choice:
        """Return the best choice, or now and then one that shows more."""
        experience, best, allowed = self.experience, self._best, self._guard.allows_drafts
        if allowed and not self._trial and experience.trials >= self._trial_cost:
            # Keep nothing: a trial that gains would pay for the next one.
            experience.trials = 0.0
            self._trial = TRIAL * [self._untried]
        if self._trial and (allowed or self._trial[-1].plan is None):
            return self._trial.pop()
        if best.plan is not None and not allowed:
            return Choice()
        if experience.probes < self._further_cost:
            return best
        experience.probes -= self._further_cost
        experience.num_surveys += best.plan is not None
        return self._further

    def _look_up(self, outlooks: Sequence[Sequence[float]], count: int) -> Choice | None:
        """Choose a prompt lookup if that gains more than one of which nothing is kept loses."""
        if not self._guard.allows_drafts:
            return None
        rate, plain = self._best.rate, self._costs.plain
        empty = self._timed.plain * self.experience.ratios.of(EMPTY)
        least = rate * max(self._timed.wait, empty - plain)
        # No verify costs less than a plain step.
        if 1 + sum(map(sum, outlooks)) / count - rate * plain <= least:
            return None
        surplus, tokens, _ = self._worth(outlooks, count)
        return Choice(LOOKUP, tokens=tokens) if surplus > least else None

    def _worth(
        self, offers: Sequence[Sequence[float]], count: int
    ) -> tuple[float, float, list[list[int]]]:
        """Find the number of drafts with the most tokens beyond what their time yields otherwise.

        All sequences pay for the size of the largest tree, so it is one number for all of them.

        Args:
            offers: Probability of each draft that it is accepted, for each sequence with drafts.
            count: Number of all sequences.

        Returns:
            Tokens per sequence beyond those, expected tokens per sequence, and the drafts of each
            sequence with drafts.
        """
        rate, orders = self._best.rate, [most_probable(one) for one in offers]
        ordered = ([one[i] for i in order] for one, order in zip(offers, orders, strict=True))
        added = (sum(chances) / count for chances in zip_longest(*ordered, fillvalue=0.0))
        sums = list(accumulate(added, initial=1.0))
        options = zip(COUNTS, self._costs.verify, strict=True)
        surplus = [sums[number] - rate * cost for number, cost in options if number < len(sums)]
        most = max(surplus)
        best = COUNTS[surplus.index(most)]
        return most, sums[best], [order[:best] for order in orders]

    def _learn(self) -> None:
        """Learn from the drafts of all steps since the last time, and decide again."""
        outcomes, self._outcomes, experience = self._outcomes, [], self.experience
        is_late = experience.learning < -self._costs.plain
        start = self._clock()
        for pending in outcomes:
            for scored in () if is_late else pending:
                if not scored.following:
                    continue
                if scored.node == 0:
                    scored.score(experience.acceptance)
                    experience.drafts.learn(scored, self._costs, self._best.rate)
                scored.follow(experience.acceptance)
            pending[:] = [one for one in pending if one.node is not None and not one.following]
        if is_late:
            return
        experience.acceptance.fit()
        self._decide()
        experience.learning -= self._clock() - start


def _largest(values: Floats) -> tuple[int, ...]:
    """Return the indices of the largest value."""
    return tuple(int(index) for index in np.unravel_index(int(values.argmax()), values.shape))


def _place_of_kind(item: tuple[tuple[DraftPlan | None, int], object]) -> tuple[int, ...]:
    (plan, num_nodes), _ = item
    return () if plan is None else (plan.from_text, plan.shape.width, plan.shape.length, num_nodes)
