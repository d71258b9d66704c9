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
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.decoding.stats import ShapeStats
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.acceptance import Acceptance, ScoredDrafts, most_probable
from mlx_redrafter.policy.plans import COUNTS, LOOKUP, PLACES, PLAIN, PLANS, SHORTEST, Choice, probe
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.policy.step_times import (
    LOOKED_UP,
    PROBE,
    SPARE,
    CurrentCosts,
    Guard,
    TimeRatios,
)
from mlx_redrafter.policy.value import ALL, COUNTED, LOOKUPS, Correction, ExpectedDrafts, Floats
from mlx_redrafter.trees.tree import TokenTree

# Share of the time for exploring, half for probes and surveys and half for trials.
EXPLORE = 0.01
# Share of the time for learning on the host, after the cost of one plain step.
LEARNING = 0.02
# Share by which drafting must seem faster than plain decoding: both are estimates.
MARGIN = 0.03
# Number of steps of a trial: a plain step is timed if plain ones come before and after it.
TRIAL = 3

# Maximum number of decisions whose steps have not been observed.
IN_FLIGHT = 2

# Whether a size verifies any drafts, by entry of COUNTS.
_VERIFIES = np.array(COUNTS) > 0


@dataclass
class Experience:
    """Estimates that one sequence hands to the next.

    Attributes:
        probes: Seconds saved for probes and surveys.
        trials: Seconds saved for trials.
        num_surveys: Number of surveys so far.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    correction: Correction = field(default_factory=lambda: Correction(COUNTED))
    lookups: Correction = field(default_factory=lambda: Correction(LOOKUPS, ALL))
    drafts: ExpectedDrafts = field(default_factory=ExpectedDrafts)
    ratios: TimeRatios = field(default_factory=TimeRatios)
    guard: Guard | None = None
    probes: float = 0.0
    trials: float = 0.0
    num_surveys: int = 0

    def for_next(self) -> Experience:
        """Return a copy for the next sequence, in which counts weigh half."""
        following = deepcopy(self)
        following.correction.fade(0.5)
        following.lookups.fade(0.5)
        following.drafts.fade()
        following.ratios.fade()
        if following.guard is not None:
            following.guard.fade()
        return following

    def without_times(self) -> Experience:
        """Return a copy for steps whose costs are others."""
        return replace(deepcopy(self), ratios=TimeRatios(), guard=None)


class Rated(NamedTuple):
    """A choice, its expected tokens, the target's own one included, and its cost in seconds."""

    choice: Choice
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass
class Decision:
    """A choice and what was expected of it.

    Attributes:
        choice: The choice.
        tokens: Expected tokens, the target's own one included.
        waits: Whether the host waited for the drafts.
        looked_up: Probabilities of the drafts of a prompt lookup that are verified.
    """

    choice: Choice = PLAIN
    tokens: float = 1.0
    waits: bool = False
    looked_up: Sequence[float] = ()


class PendingDrafts:
    """Drafts of one sequence that the policy still learns from.

    Attributes:
        newest: Drafts of the step in flight, before its tokens are known.
        open: Drafts of earlier steps that later tokens may prove right or wrong.
    """

    def __init__(self) -> None:
        self.newest: ScoredDrafts | None = None
        self.open: list[ScoredDrafts] = []


class AdaptivePolicy:
    """A `DraftPolicy` that learns; no text depends on what it decides.

    Args:
        costs: Seconds of steps, as timed beforehand.
        before: Experience of the previous sequence.
        clock: Function that returns the time in seconds, to limit the host's learning.
        max_length: Longest beams that the proposer can draft; None if it has no bound.

    Attributes:
        experience: Experience of this sequence so far.
        waits: Whether the host waited for the drafts of the last step before it verified them.
    """

    def __init__(
        self,
        costs: StepCosts,
        before: Experience | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_length: int | None = None,
    ):
        self.experience = Experience() if before is None else before.for_next()
        self.waits = False
        self._timed = costs
        self._costs = CurrentCosts(costs, max_length)
        self._costs.update(self.experience.ratios)
        self._guard = self.experience.guard = self.experience.guard or Guard(self._costs.plain)
        # The choice under trial and its remaining steps.
        self._trial, self._trial_steps = PLAIN, 0
        # Decisions whose steps have not been observed, and the newest one.
        self._in_flight: deque[Decision] = deque()
        self._newest = Decision()
        self._pending = PendingDrafts()
        # Whether a drafted step was timed since the last decision, and tokens to learn from.
        self._is_stale = False
        self._outcomes: list[tuple[PendingDrafts, ScoredDrafts | None, Sequence[int]]] = []
        self._was_plain = False
        self._clock, self._learning, self._elapsed = clock, 0.0, 0.0
        # Steps, tokens, expected tokens, seconds and expected seconds by kind of step.
        self._totals: dict[tuple[DraftPlan | None, int], list[float]] = {}
        self._decide()

    @property
    def is_used(self) -> bool:
        """Whether this policy has observed a step."""
        return bool(self._totals)

    @property
    def shows_long_times(self) -> bool:
        """Whether steps cost far less than was timed: other work disturbed the timing."""
        return self.experience.ratios.are_low

    def choose(self, outlook: Sequence[float] | None = None) -> DraftPlan | None:
        return self.choose_for([outlook] if outlook else [], 1)

    def choose_for(self, outlooks: Sequence[Sequence[float]], count: int) -> DraftPlan | None:
        """Choose the plan of the next step of several sequences.

        Args:
            outlooks: Outlooks of the sequences for which a prompt lookup finds something.
            count: Number of all sequences.
        """
        self._learn()
        tokens = 0.0
        if outlooks and self._guard.allows_drafts:
            tokens = self._lookup_tokens(outlooks, count)
        if tokens:
            self._newest = Decision(Choice(LOOKUP), tokens)
        else:
            choice = self._explore()
            self._newest = Decision(choice, self._expected_tokens(choice))
        self._in_flight.append(self._newest)
        if len(self._in_flight) > IN_FLIGHT:  # the sequence that was timed has ended
            self._in_flight.popleft()
        return self._newest.choice.plan

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        (kept,) = self.keep_all([(self._pending, tree)], 1)
        return kept

    def keep_all(
        self, offers: Sequence[tuple[PendingDrafts, TokenTree]], count: int
    ) -> list[TokenTree]:
        """Select the drafts to verify, with padding if a larger size costs less.

        Args:
            offers: Drafts of the newest plan, for each sequence that has any.
            count: Number of all sequences.
        """
        kept = self._select(offers, count)
        size = self._timed.cheapest_size(max(tree.size for tree in kept))
        return [tree if tree.size == 1 else tree.padded(size) for tree in kept]

    def _select(
        self, offers: Sequence[tuple[PendingDrafts, TokenTree]], count: int
    ) -> list[TokenTree]:
        decision, self.waits = self._newest, False
        plan, wanted = decision.choice.plan, decision.choice.num_nodes
        assert plan is not None
        if plan.from_text:
            found = [[math.exp(score) for score in tree.read().scores] for _, tree in offers]
            _, decision.tokens, kept = self._worth(found, count, is_lookup=True)
            decision.waits, decision.looked_up = True, [found[0][draft] for draft in kept[0]]
            return [tree.subtree(one) for (_, tree), one in zip(offers, kept, strict=True)]
        for pending, tree in offers:
            pending.newest = ScoredDrafts(plan.searched, tree)
        if wanted != 1 and not self._guard.allows_drafts:
            # The step in flight when this one was chosen has cost too much.
            wanted, decision.tokens, self._trial_steps = 1, 1.0, 0
        if wanted is None:
            self.waits = decision.waits = True
            found = [
                pending.newest.score(self.experience.acceptance)
                for pending, _ in offers
                if pending.newest is not None
            ]
            _, decision.tokens, kept = self._worth(found, count)
            return [tree.subtree(one) for (_, tree), one in zip(offers, kept, strict=True)]
        most = min(wanted, *(tree.size for _, tree in offers))
        size = max(size for size in (1, *self._timed.verify) if size <= most)
        return [tree.first(size) for _, tree in offers]

    def observe(self, step: Step) -> None:
        self.observe_time(step)
        self.observe_tokens(self._pending, step.tokens)

    def observe_time(self, step: Step) -> None:
        """Learn from the cost of a step, at once: `keep` of the next one depends on it."""
        # The last step of a sequence is observed without having been chosen.
        decision = self._in_flight.popleft() if self._in_flight else Decision()
        plan, kind, num_tokens = step.plan, step.num_nodes, len(step.tokens)
        if plan is not None and plan.from_text:
            kind = LOOKED_UP
            accepted = [place < num_tokens - 1 for place in range(len(decision.looked_up))]
            self.experience.lookups.learn(decision.looked_up, accepted)
        elif plan is not None and kind == 1:
            kind = PROBE
        self._is_stale |= plan is not None
        timed = self._costs.timed(plan, step.num_nodes, decision.waits)
        expected = timed * self.experience.ratios.of(kind)
        seconds = expected if step.seconds is None else step.seconds
        total = self._totals.setdefault((plan, step.num_nodes), [0.0] * 5)
        news = 1, num_tokens, decision.tokens, seconds, expected
        total[:] = [known + new for known, new in zip(total, news, strict=True)]
        self._guard.count(num_tokens)
        if step.seconds is not None:
            self._save(step, decision)
            self._learn_time(step, kind, timed)

    def observe_tokens(self, pending: PendingDrafts, tokens: Sequence[int]) -> None:
        """Store the tokens of a sequence's step; `choose` learns while the device is busy."""
        newest, pending.newest = pending.newest, None
        if newest is not None or pending.open or self._outcomes:
            self._outcomes.append((pending, newest, tokens))

    def conclude(self) -> Experience:
        """End the sequence and return its experience."""
        self._learn()
        return self.experience

    def shapes(self) -> list[ShapeStats]:
        """Return the statistics of every kind of step: plain ones first, then by shape."""
        self._learn()
        plain = self._costs.plain
        found = [] if (None, 1) in self._totals else [ShapeStats(None, plain, 0, 0, plain, 0.0)]
        for (plan, num_nodes), total in sorted(self._totals.items(), key=_place_of_kind):
            steps, tokens, expected, seconds, expected_seconds = total
            kind = None if plan is None else replace(plan, num_nodes=num_nodes)
            means = seconds / steps, int(steps), int(tokens), expected_seconds / steps
            found.append(ShapeStats(kind, *means, expected))
        return found

    def _decide(self) -> None:
        """Find the best choices by the current estimates."""
        experience, costs = self.experience, self._costs
        costs.update(experience.ratios)
        self._best = Rated(PLAIN, 1 + MARGIN, costs.plain)
        if not self._timed.level:
            return
        # A fixed number of nodes: the host is ahead of the device.
        self._tokens = 1 + experience.correction.apply(experience.drafts.mean)
        w, n, size = place = _largest(self._tokens * _VERIFIES / costs.step)
        choice = Choice(PLANS[w, n], 1 + COUNTS[size])
        self._fixed = Rated(choice, float(self._tokens[place]), float(costs.step[place]))
        # As many nodes as pay, once the host knows the drafts.
        drafts, relative = experience.drafts.chosen
        seconds = relative * costs.waiting[..., 1]
        w, n = place = _largest((1 + drafts) / seconds * costs.offered)
        waiting = Rated(Choice(PLANS[w, n]), 1 + float(drafts[place]), float(seconds[place]))
        self._best = max(self._best, self._fixed, waiting, key=lambda rated: rated.rate)
        best = max(self._fixed, waiting, key=lambda rated: rated.rate)
        self._probed = best.choice.plan or SHORTEST

    def _explore(self) -> Choice:
        """Return the best choice, or now and then one that shows more."""
        best, plain, trials = self._best, self._costs.plain, self.experience.trials
        if not self._timed.level:
            return PLAIN
        allowed = self._guard.allows_drafts
        if self._trial_steps and (self._trial.plan is None or allowed):
            self._trial_steps -= 1
            return self._trial
        if best.choice.plan is None:
            loss = self._fixed.seconds - self._fixed.tokens * plain
            if allowed and self.experience.ratios.knows(1) and trials >= TRIAL * loss:
                return self._begin_trial(self._fixed.choice)
            w, n = PLACES[self._probed.shape]
            cost = float(self._costs.step[w, n, 0]) - plain
            return self._pay(cost, probe(self._probed), PLAIN)
        if not allowed:
            return PLAIN
        if trials >= TRIAL * (plain - 1 / best.rate):
            return self._begin_trial(PLAIN)
        return self._survey(best.choice)

    def _survey(self, choice: Choice) -> Choice:
        """Draft longer and wider in turns, if the budget pays for it."""
        assert choice.plan is not None
        w, n = PLACES[choice.plan.shape]
        further = [place for place in ((w, n + 1), (w + 1, n)) if place in PLANS]
        further = [place for place in further if self._costs.offered[place]]
        if not further:
            return choice
        place = further[self.experience.num_surveys % len(further)]
        cost = float(self._costs.drafting[place] - self._costs.drafting[w, n])
        if choice.num_nodes is not None:  # what its first nodes are expected to yield less
            w, n = place
            size = w, n, COUNTS.index(choice.num_nodes - 1)
            cost = max(cost, float(self._costs.step[size] - self._tokens[size] / self._best.rate))
        chosen = self._pay(cost, choice._replace(plan=PLANS[place]), choice)
        self.experience.num_surveys += chosen is not choice
        return chosen

    def _begin_trial(self, choice: Choice) -> Choice:
        self._trial, self._trial_steps = choice._replace(is_trial=True), TRIAL - 1
        return self._trial

    def _pay(self, seconds: float, choice: Choice, otherwise: Choice) -> Choice:
        if self.experience.probes < seconds:
            return otherwise
        self.experience.probes -= seconds
        return choice

    def _expected_tokens(self, choice: Choice) -> float:
        if choice.plan is None or choice.num_nodes == 1:
            return 1.0
        return self._fixed.tokens if choice.is_trial else self._best.tokens

    def _lookup_tokens(self, outlooks: Sequence[Sequence[float]], count: int) -> float:
        """Expected tokens of a prompt lookup if it is faster than the best choice; else 0."""
        surplus, tokens, _ = self._worth(outlooks, count, is_lookup=True)
        if surplus > 0:
            return tokens
        self.experience.lookups.fade(1 - 1 / LOOKUPS)  # the text has moved on
        return 0.0

    def _worth(
        self, offers: Sequence[Sequence[float]], count: int, is_lookup: bool = False
    ) -> tuple[float, float, list[list[int]]]:
        """Find the number of drafts with the most tokens beyond what their time yields otherwise.

        All sequences pay for the size of the largest tree, so it is one number for all of them.

        Args:
            offers: Probability of each draft that it is accepted, for each sequence with drafts.
            count: Number of all sequences.
            is_lookup: Whether the drafts come from prompt lookup.

        Returns:
            Tokens per sequence beyond those, expected tokens per sequence, and the drafts of each
            sequence with drafts.
        """
        experience, costs, rate = self.experience, self._costs, self._best.rate
        share = (experience.lookups if is_lookup else experience.correction).share.tolist()
        seconds = (costs.lookup if is_lookup else costs.verify).tolist()
        orders = [most_probable(probabilities) for probabilities in offers]
        longest = max(map(len, orders))
        sums = [1.0] * (1 + longest)
        for order, probabilities in zip(orders, offers, strict=True):
            expected = (probabilities[i] * part for i, part in zip(order, share, strict=False))
            added = list(accumulate(expected, initial=0.0))
            for number in range(1, 1 + longest):
                sums[number] += added[min(number, len(added) - 1)] / count
        options = zip(COUNTS, seconds, strict=True)
        surplus = {
            number: sums[number] - rate * cost for number, cost in options if number <= longest
        }
        best = max(surplus, key=surplus.__getitem__)
        return surplus[best], sums[best], [order[:best] for order in orders]

    def _learn(self) -> None:
        """Learn from the drafts of all steps since the last time."""
        outcomes, self._outcomes = self._outcomes, []
        if self._learning > self._costs.plain + LEARNING * self._elapsed:
            for pending, _, _ in outcomes:
                pending.open.clear()
            return
        if not (outcomes or self._is_stale):
            return
        start, experience = self._clock(), self.experience
        for pending, newest, tokens in outcomes:
            self._learn_drafts(pending, newest, tokens)
        if outcomes:
            experience.acceptance.fit()
        self._is_stale = False
        self._decide()
        self._learning += self._clock() - start

    def _learn_drafts(
        self, pending: PendingDrafts, newest: ScoredDrafts | None, tokens: Sequence[int]
    ) -> None:
        """Learn from one step's drafts, and from its tokens about all drafts that are open."""
        experience = self.experience
        if newest is not None:
            newest.score(experience.acceptance)
            experience.drafts.learn(newest, experience.correction, self._costs, self._best.rate)
            pending.open.append(newest)
        for scored in pending.open:
            scored.follow(tokens, experience.acceptance)
            if scored.node is None:
                order = most_probable(scored.probabilities)
                expected = [scored.probabilities[draft] for draft in order]
                experience.correction.learn(expected, [draft in scored.right for draft in order])
        pending.open = [scored for scored in pending.open if scored.node is not None]

    def _save(self, step: Step, decision: Decision) -> None:
        """Save a share of a step's seconds for exploring, and charge a trial what it has lost."""
        assert step.seconds is not None
        experience, plain = self.experience, self._costs.plain
        self._elapsed += step.seconds
        saved, most = EXPLORE / 2 * step.seconds, SPARE * plain
        experience.probes = min(most, experience.probes + saved)
        experience.trials = min(most, experience.trials + saved)
        if decision.choice.is_trial:  # what is left, or was gained, is not kept
            rate = self._best.rate if step.plan is None else 1 / plain
            lost = step.seconds - len(step.tokens) / rate
            experience.trials = min(0.0, experience.trials - lost)

    def _learn_time(self, step: Step, kind: int, timed: float) -> None:
        """Learn from the cost of a step."""
        assert step.seconds is not None
        was_plain, self._was_plain = self._was_plain, step.plan is None
        if step.plan is not None:
            self.experience.ratios.learn(kind, step.seconds / timed)
            self._guard.learn_drafted(step.seconds, len(step.tokens), kind != PROBE)
        elif was_plain and self._newest.choice.plan is None:
            # A plain step is dispatched before the one before is read: in a row of them the first
            # seems longer and the last shorter than they are.
            self.experience.ratios.learn(1, step.seconds / timed)
            self._guard.learn_plain(step.seconds)


def _largest(values: Floats) -> tuple[int, ...]:
    """Return the indices of the largest value."""
    return tuple(int(index) for index in np.unravel_index(int(values.argmax()), values.shape))


def _place_of_kind(item: tuple[tuple[DraftPlan | None, int], object]) -> tuple[int, ...]:
    (plan, num_nodes), _ = item
    return () if plan is None else (plan.from_text, plan.shape.width, plan.shape.length, num_nodes)
