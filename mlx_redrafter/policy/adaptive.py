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
from dataclasses import dataclass, replace

import numpy as np

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.decoding.stats import ShapeStats
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.acceptance import Acceptance, ScoredDrafts, cumulative, most_probable
from mlx_redrafter.policy.plans import (
    COUNTS,
    FITS,
    LOOKUP,
    PLACES,
    PLAIN,
    PLANS,
    SIZES,
    Choice,
    probe,
)
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.policy.step_times import (
    LOOKED_UP,
    PROBE,
    SPARE,
    CurrentCosts,
    Guard,
    TimeRatios,
)
from mlx_redrafter.policy.value import (
    BUCKETS,
    MEMORY,
    Correction,
    ExpectedDrafts,
    LookupCorrection,
)
from mlx_redrafter.trees.tree import TokenTree

# Share of the time for exploring, half for probes and surveys and half for trials.
EXPLORE = 0.01
# Share of the time for learning on the host, after the cost of one plain step.
LEARNING = 0.02
# Share by which drafting must seem faster than plain decoding: both are estimates.
MARGIN = 0.03
# Number of steps of a trial: a plain step is timed if plain ones come before and after it.
TRIAL = 3


class Experience:
    """Estimates that one sequence hands to the next.

    Args:
        before: Experience of the previous sequence.
        window: Number of trees that means are over.
    """

    def __init__(self, before: Experience | None = None, window: int = MEMORY):
        self.acceptance = Acceptance()
        self.correction = Correction()
        self.lookups = LookupCorrection()
        self.drafts = ExpectedDrafts(window=window)
        self.ratios = TimeRatios()
        self.guard: Guard | None = None
        # Seconds saved for probes and surveys, and for trials.
        self.probes, self.trials = 0.0, 0.0
        self.num_surveys = 0
        if before is not None:
            self.acceptance = Acceptance(before.acceptance)
            self.correction = Correction(before.correction)
            self.lookups = LookupCorrection(before.lookups)
            self.drafts = ExpectedDrafts(before.drafts, window)
            self.ratios = TimeRatios(before.ratios)
            self.guard = before.guard
            self.probes, self.trials = before.probes, before.trials
            self.num_surveys = before.num_surveys

    def forget_times(self) -> None:
        """Forget time ratios, as steps will be timed again."""
        self.ratios, self.guard = TimeRatios(), None


@dataclass
class Decision:
    """A choice and what was expected of it.

    Attributes:
        choice: The choice.
        tokens: Expected tokens, the target's own one included.
        waits: Whether the host waited for the drafts.
        promised: Accepted drafts that prompt lookup expects, without correction.
    """

    choice: Choice = PLAIN
    tokens: float = 1.0
    waits: bool = False
    promised: float = 0.0


class PendingDrafts:
    """Drafts of one sequence that the policy still learns from.

    Attributes:
        newest: Drafts of the step in flight, before its tokens are known.
        open: Drafts of earlier steps that later tokens may prove right or wrong.
    """

    def __init__(self) -> None:
        self.newest: ScoredDrafts | None = None
        self.open: list[ScoredDrafts] = []


@dataclass
class Total:
    """Sums over the steps of one kind, for statistics."""

    steps: int = 0
    tokens: int = 0
    expected_tokens: float = 0.0
    seconds: float = 0.0
    expected_seconds: float = 0.0

    def add(self, step: Step, decision: Decision, expected_seconds: float) -> None:
        """Add a step; one without a measured time counts as it was expected."""
        self.steps += 1
        self.tokens += len(step.tokens)
        self.expected_tokens += decision.tokens
        self.seconds += expected_seconds if step.seconds is None else step.seconds
        self.expected_seconds += expected_seconds


@dataclass
class _Best:
    """The plans between which the policy decides.

    Attributes:
        choice: The choice with the highest rate.
        tokens: Its expected tokens.
        rate: Its tokens per second; drafting must exceed that of plain decoding by MARGIN.
        fixed: The best drafting choice whose number of nodes is fixed.
        fixed_tokens: Its expected tokens.
        fixed_seconds: Its cost.
        probed: The plan to probe while decoding plainly.
    """

    choice: Choice
    tokens: float
    rate: float
    fixed: Choice = PLAIN
    fixed_tokens: float = 1.0
    fixed_seconds: float = math.inf
    probed: DraftPlan = PLANS[0, 0]


class AdaptivePolicy:
    """A `DraftPolicy` that learns; no text depends on what it decides.

    Args:
        costs: Seconds of steps, as timed beforehand.
        before: Experience of the previous sequence.
        clock: Function that returns the time in seconds, to limit the host's learning.
        max_length: Longest beams that the proposer can draft; None if it has no bound.
        window: Number of trees that means are over.

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
        window: int = MEMORY,
    ):
        self.experience = Experience(before, window)
        self.waits = False
        self._timed = costs
        self._costs = CurrentCosts(costs, max_length)
        self._costs.update(self.experience.ratios)
        self._guard = Guard(self._costs.plain, self.experience.guard)
        self.experience.guard = self._guard
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
        self._totals: dict[tuple[DraftPlan | None, int], Total] = {}
        # Expected tokens of plans with a fixed number of nodes, shape (W, L, S).
        self._tokens = np.ones(FITS.shape)[..., 1:]
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
        self._learn()
        allowed = self._guard.allows_drafts
        expected = self._lookup_tokens(outlook) if outlook and allowed else 0.0
        if expected:
            self._newest = Decision(Choice(LOOKUP), expected)
        else:
            choice = self._explore()
            self._newest = Decision(choice, self._expected_tokens(choice))
        self._in_flight.append(self._newest)
        return self._newest.choice.plan

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        return self.keep_for(self._pending, plan, tree)

    def keep_for(self, pending: PendingDrafts, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """Select the drafts of one sequence to verify.

        Args:
            pending: Drafts of that sequence.
            plan: Plan of the drafts.
            tree: The drafts.
        """
        decision, self.waits = self._newest, False
        if plan.from_text:
            probabilities = [math.exp(score) for score in tree.read().scores]
            share = [self.experience.lookups.share] * COUNTS[-1]
            _, decision.tokens, kept = self._worth(probabilities, share, self._costs.lookup)
            decision.waits, decision.promised = True, sum(probabilities[i] for i in kept)
            return tree.subtree(kept)
        pending.newest = ScoredDrafts(replace(plan, num_nodes=plan.shape.max_nodes), tree)
        wanted = decision.choice.num_nodes
        if wanted != 1 and not self._guard.allows_drafts:
            # The step in flight when this one was chosen has cost too much.
            wanted, decision.tokens, self._trial_steps = 1, 1.0, 0
        if wanted is None:
            self.waits = decision.waits = True
            probabilities = pending.newest.score(self.experience.acceptance)
            share = self.experience.correction.share[1][BUCKETS].tolist()
            _, decision.tokens, kept = self._worth(probabilities, share, self._costs.verify)
            return tree.subtree(kept)
        most = min(wanted, tree.size)
        return tree.first(max(size for size in (1, *self._timed.verify) if size <= most))

    def observe(self, step: Step) -> None:
        self.observe_time(step)
        self.observe_tokens(self._pending, step.tokens)

    def observe_time(self, step: Step) -> None:
        """Learn from the cost of a step, at once: `keep` of the next one depends on it."""
        # The last step of a sequence is observed without having been chosen.
        decision = self._in_flight.popleft() if self._in_flight else Decision()
        self._is_stale |= step.plan is not None
        self._learn_time(step, decision)

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
            kind = None if plan is None else DraftPlan(plan.shape, num_nodes, plan.from_text)
            found.append(
                ShapeStats(
                    kind,
                    total.seconds / total.steps,
                    total.steps,
                    total.tokens,
                    total.expected_seconds / total.steps,
                    total.expected_tokens,
                )
            )
        return found

    def _decide(self) -> None:
        """Find the best choices by the current estimates."""
        experience, costs = self.experience, self._costs
        costs.update(experience.ratios)
        best = _Best(PLAIN, 1.0, (1 + MARGIN) / costs.plain)
        self._best = best
        if not self._timed.level:
            return
        # A fixed number of nodes: the host is ahead of the device.
        tokens = 1 + experience.correction.apply(experience.drafts.mean)[0, ..., 1:]
        self._tokens = tokens
        rates = tokens / costs.step[..., 1:]
        w, n, size = np.unravel_index(int(rates.argmax()), rates.shape)
        rate, place = float(rates[w, n, size]), (int(w), int(n))
        best.fixed = Choice(PLANS[place], SIZES[size])
        best.fixed_tokens = float(tokens[w, n, size])
        best.fixed_seconds = best.fixed_tokens / rate
        if rate > best.rate:
            best.choice, best.tokens, best.rate = best.fixed, best.fixed_tokens, rate
        # As many nodes as pay, once the host knows the drafts.
        drafts, relative = experience.drafts.chosen
        rates = (1 + drafts) / (relative * costs.fewest) * costs.offered
        w, n = np.unravel_index(int(rates.argmax()), rates.shape)
        if rates[w, n] > rate:
            place = int(w), int(n)
        if rates[w, n] > best.rate:
            best.choice = Choice(PLANS[place])
            best.tokens, best.rate = 1 + float(drafts[w, n]), float(rates[w, n])
        best.probed = PLANS[place]

    def _explore(self) -> Choice:
        """Return the best choice, or now and then one that shows more."""
        best, plain, trials = self._best, self._costs.plain, self.experience.trials
        if not self._timed.level:
            return PLAIN
        if self._trial_steps and (self._trial.plan is None or self._guard.allows_drafts):
            self._trial_steps -= 1
            return self._trial
        if best.choice.plan is None:
            # Seconds that a trial is expected to lose.
            loss = TRIAL * max(0.0, best.fixed_seconds - best.fixed_tokens * plain)
            is_sure = self.experience.ratios.knows(1) and self._guard.allows_drafts
            if is_sure and trials >= loss:
                return self._begin_trial(best.fixed)
            cost = float(self._costs.step[PLACES[best.probed.shape]][0]) - plain
            return self._pay(probe(best.probed), cost, PLAIN)
        if not self._guard.allows_drafts:
            return PLAIN
        if trials >= TRIAL * (plain - 1 / best.rate):
            return self._begin_trial(PLAIN)
        return self._survey(best.choice)

    def _survey(self, choice: Choice) -> Choice:
        """Draft longer and wider in turns, if the budget pays for it."""
        assert choice.plan is not None
        w, n = PLACES[choice.plan.shape]
        further = [PLANS[place] for place in ((w, n + 1), (w + 1, n)) if place in PLANS]
        further = [plan for plan in further if self._costs.offered[PLACES[plan.shape]]]
        if not further:
            return choice
        plan = further[self.experience.num_surveys % len(further)]
        cost = self._drafting(plan) - self._drafting(choice.plan)
        if choice.num_nodes is not None:  # what its first nodes are expected to yield less
            cost = max(cost, self._loss(plan, choice.num_nodes))
        chosen = self._pay(choice._replace(plan=plan), cost, choice)
        self.experience.num_surveys += chosen is not choice
        return chosen

    def _loss(self, plan: DraftPlan, num_nodes: int) -> float:
        """Seconds that a step of a plan is expected to lose to the best choice."""
        w, n = PLACES[plan.shape]
        size = SIZES.index(num_nodes)
        seconds, tokens = self._costs.step[w, n, 1 + size], self._tokens[w, n, size]
        return float(seconds - tokens / self._best.rate)

    def _begin_trial(self, choice: Choice) -> Choice:
        self._trial, self._trial_steps = choice._replace(is_trial=True), TRIAL - 1
        return self._trial

    def _pay(self, choice: Choice, seconds: float, otherwise: Choice) -> Choice:
        if self.experience.probes < seconds:
            return otherwise
        self.experience.probes -= seconds
        return choice

    def _drafting(self, plan: DraftPlan) -> float:
        return float(self._costs.drafting[PLACES[plan.shape]])

    def _expected_tokens(self, choice: Choice) -> float:
        if choice.plan is None or choice.num_nodes == 1:
            return 1.0
        return self._best.fixed_tokens if choice.is_trial else self._best.tokens

    def _lookup_tokens(self, outlook: Sequence[float]) -> float:
        """Expected tokens of a prompt lookup if it is faster than the best choice; else 0."""
        share = [self.experience.lookups.share] * COUNTS[-1]
        surplus, tokens, _ = self._worth(outlook, share, self._costs.lookup)
        if surplus > 0:
            return tokens
        self.experience.lookups.forget()
        return 0.0

    def _worth(
        self, probabilities: Sequence[float], share: Sequence[float], seconds: np.ndarray
    ) -> tuple[float, float, list[int]]:
        """Find the number of drafts with the most tokens beyond what their time yields otherwise.

        Args:
            probabilities: Probability of each draft that it is accepted.
            share: Share of it to expect, by place in the order.
            seconds: Cost of the step, by entry of COUNTS.

        Returns:
            Tokens beyond those, expected tokens, and the drafts.
        """
        order = most_probable(probabilities)
        shares = zip(order, share, strict=False)
        sums = cumulative(probabilities[draft] * part for draft, part in shares)
        rate = self._best.rate
        options = zip(COUNTS, seconds.tolist(), strict=True)
        values = [1 + sums[count] - rate * cost for count, cost in options if count < len(sums)]
        best = max(range(len(values)), key=values.__getitem__)
        return values[best], 1 + sums[COUNTS[best]], order[: COUNTS[best]]

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
            if newest is not None:
                newest.score(experience.acceptance)
                rate = self._best.rate
                experience.drafts.learn(newest, experience.correction, self._costs, rate)
                pending.open.append(newest)
            for scored in pending.open:
                scored.follow(tokens, experience.acceptance)
                if scored.node is None:
                    experience.correction.learn(scored.probabilities, scored.right)
            pending.open = [scored for scored in pending.open if scored.node is not None]
        if any(newest is not None for _, newest, _ in outcomes):
            experience.acceptance.fit()
        self._is_stale = False
        self._decide()
        self._learning += self._clock() - start

    def _learn_time(self, step: Step, decision: Decision) -> None:
        """Learn from the cost of a step, and save for the budget."""
        plan, num_tokens, plain = step.plan, len(step.tokens), self._costs.plain
        kind = step.num_nodes if plan is None or step.num_nodes > 1 else PROBE
        if plan is not None and plan.from_text:
            kind = LOOKED_UP
            self.experience.lookups.learn(decision.promised, num_tokens - 1)
        timed = self._costs.timed(plan, step.num_nodes, decision.waits)
        total = self._totals.setdefault((plan, step.num_nodes), Total())
        total.add(step, decision, timed * self.experience.ratios.of(kind))
        self._guard.count(num_tokens)
        if step.seconds is None:
            return
        self._elapsed += step.seconds
        saved, experience = EXPLORE / 2 * step.seconds, self.experience
        experience.probes = min(SPARE * plain, experience.probes + saved)
        experience.trials = min(SPARE * plain, experience.trials + saved)
        if decision.choice.is_trial:  # pays what it has lost; what is left or gained is not kept
            rate = self._best.rate if plan is None else 1 / plain
            experience.trials = min(0.0, experience.trials - step.seconds + num_tokens / rate)
        if plan is not None:
            self._was_plain = False
            self.experience.ratios.learn(kind, step.seconds / timed)
            self._guard.learn_drafted(step.seconds, num_tokens, kind != PROBE)
            return
        # A plain step is dispatched before the one before is read: in a row of them the first seems
        # longer and the last shorter than they are.
        if self._was_plain and self._newest.choice.plan is None:
            self.experience.ratios.learn(1, step.seconds / self._timed.plain)
            self._guard.learn_plain(step.seconds)
        self._was_plain = True


def _place_of_kind(item: tuple[tuple[DraftPlan | None, int], object]) -> tuple[int, ...]:
    (plan, num_nodes), _ = item
    return () if plan is None else (plan.from_text, plan.shape.width, plan.shape.length, num_nodes)
