"""The plan expected to be fastest, step by step: how far to draft, and how much to verify.

Every draft, verified or not, is compared with the text that follows it, which calibrates the
proposer's probabilities. Calibrated, the drafts of one step say what every plan within their shape
would have got; plans beyond it are extrapolated. The plan with the most expected tokens per second
is next; plain decoding is one of them.

Axes: W widths on offer, L lengths, S numbers of nodes, n drafts of a tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import exp

import numpy as np
import numpy.typing as npt

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.decoding.stats import ShapeStats
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.awaited_drafts import AwaitedDrafts
from mlx_redrafter.policy.candidates import (
    FITS,
    LENGTHS,
    LONGEST,
    LOOKUP,
    PLACES,
    PLANS,
    SIZES,
    expected_drafts,
    highest,
)
from mlx_redrafter.policy.choice import PLAIN, Choice
from mlx_redrafter.policy.credits import EXPLORE_AT_FIRST, Credits
from mlx_redrafter.policy.experience import Experience
from mlx_redrafter.policy.learning_time import LearningTime
from mlx_redrafter.policy.lessons import Outcome, Taken, learn_time, together
from mlx_redrafter.policy.prices import Prices
from mlx_redrafter.policy.promises import Promises
from mlx_redrafter.policy.seen_drafts import SeenDrafts
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.policy.tally import Tally
from mlx_redrafter.trees.tree import TokenTree

Floats = npt.NDArray[np.float64]

# Least part of the time for exploring that is used where drafts seem hopeless.
LEAST_HOPE = 0.6
# Steps with drafts between two that show what longer and wider searches would give, and steps from
# one whose drafts are only looked at to the next: plain ones in a row are timed.
SURVEY_EVERY, LOOKS, LOOK_EVERY = 8, 3, 10
# Steps without drafts, or with the best ones, whichever is not in use, that show whether they take
# as long as thought: how many, and after how many, fewer where both seem alike.
TRIAL, TRIAL_SOONEST, TRIAL_EVERY = 4, 16, 128
# How many times as many between two where those before have changed nothing.
MOST_CALM = 4
# Speed of drafts by that of plain decoding from which trials of them do not become rarer.
NEAR = 0.9
# How much slower they may seem for a trial.
CLOSE = 1.5
# Steps that teach nothing but their times until those are learnt from, which takes the host's time:
# plain ones, and those with drafts in use, whose times are mostly learnt from with some drafts.
LOOK_AGAIN, LOOK_AGAIN_DRAFTING = 8, 32
# Seconds by which plain steps' time has to change for choices to be compared again, which takes the
# host's time as well: all times change with it, mostly alike.
LEAST_CHANGE = 1e-4
# Plain steps decided in advance from which they are taken in as one.
SEVERAL = 3
# How much faster than plain decoding drafts must seem: times and gains are estimates.
MARGIN = 0.03


class AdaptivePolicy:
    """See `DraftPolicy`; the text does not depend on what it decides.

    Args:
        costs: Seconds of steps, as timed beforehand.
        before: Experience of the text before.
        clock: Seconds so far, by which learning is kept short.
        max_length: Longest beams that the proposer can draft; None where nothing bounds them.

    Attributes:
        experience: Experience of this text so far.
        waits: Whether the last step looked at its drafts before they were verified.
    """

    def __init__(
        self,
        costs: StepCosts,
        before: Experience | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_length: int | None = None,
    ):
        self.experience = Experience([1, *costs.verify], before)
        self.waits = False
        self._costs = costs
        fits, self._longest = FITS, LONGEST
        if max_length is not None:
            fits = FITS & (np.array(LENGTHS) <= max_length)[:, None]
            self._longest = PLANS[PLACES[LONGEST.within(max_length).shape]]
        self._offered = fits.any(axis=-1)
        self._prices = Prices(costs, fits)
        self._credits = Credits(0.0 if before else EXPLORE_AT_FIRST * costs.plain)
        self._until_survey = SURVEY_EVERY // 2
        # Drafts that lookups have promised and not brought yet.
        self._promised: list[tuple[Promises, float]] = []
        self._tally = Tally()
        self._last: DraftPlan | None = None
        self._next = PLAIN
        # Plain steps decided in advance: how many, how many are left, and those taken.
        self._ahead = self._left = 0
        self._rested: list[Step] = []
        self._seen: SeenDrafts | None = None
        # What is to be learnt from.
        self._taken: list[Taken] = []
        self._outcomes: list[Outcome] = []
        self._awaited = AwaitedDrafts()
        self._time = LearningTime(clock, costs.plain, is_first=before is None)
        self._best = PLAIN
        self._decide()

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        """See `DraftPolicy.choose`."""
        looks_up = self._looks_up(outlook)
        if self._left and not looks_up:
            self._left -= 1
            return None
        self._catch_up()
        may_learn = self._time.is_due and not self._is_trying
        if may_learn and any(outcome.seen for outcome in self._outcomes):
            with self._time.spent():
                self._learn()
                self._decide()
        elif self._num_taken >= (LOOK_AGAIN if self._best is PLAIN else LOOK_AGAIN_DRAFTING):
            has_drafted = any(taken.step.plan for taken in self._taken)
            self._learn()
            plain = self._costs.plain * self.experience.slowdowns.of(1)
            if has_drafted or abs(plain - self._prices.plain) > LEAST_CHANGE:
                self._decide()
        self._next = Choice(LOOKUP) if looks_up else self._explore(self._best)
        if self._next is PLAIN:
            self._ahead = self._left = self._steps_ahead()
        plan, num_nodes = self._next
        return replace(plan, num_nodes=1) if plan is not None and num_nodes == 1 else plan

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """See `DraftPolicy.keep`; waits for the drafts where it depends on them."""
        if plan.from_text:
            self.waits = False
            chances = [exp(score) for score in tree.read().scores]
            return tree.subtree(self._prices.worth(chances, self._rate))
        self._seen = SeenDrafts(plan, tree)
        return self.select(self._seen, tree)

    def select(self, seen: SeenDrafts, tree: TokenTree) -> TokenTree:
        """The nodes of a network's drafts that are worth verifying, of any text with the same plan.

        Args:
            seen: The drafts.
            tree: Tree of them.
        """
        wanted = self._next.num_nodes
        self.waits = wanted is None
        if wanted is None:
            chances = seen.chances(self.experience.calibration)
            return tree.subtree(self._prices.worth(chances, self._rate))
        most = min(wanted, tree.size)
        if most == 1:
            return tree.first(1)
        return tree.first(max(size for size in self._costs.verify if size <= most))

    def observe(self, step: Step) -> None:
        """See `DraftPolicy.observe`; `choose` learns from it, when the device is busy."""
        if self._ahead and step.plan is None:
            self._rested.append(step)
        else:
            self._take_in(step)

    def _take_in(self, step: Step, num_steps: int = 1) -> None:
        # A plain step is dispatched before the outcome of the one before is read, which may wait
        # for both: the first of some plain steps takes twice its time, and the last one none.
        is_plain = step.plan is None
        is_inner = (self._last is None) == is_plain == (self._next.plan is None)
        # Learning takes the host's time, which is a part of what drafts take where they are in use.
        is_disturbed = self._time.take(num_steps * (step.seconds or self._prices.plain))
        is_disturbed &= is_plain or self._best is PLAIN
        self._last = step.plan
        is_typical = num_steps > 1 or (is_inner and not is_disturbed)
        self._taken.append(Taken(step, is_typical, self.waits, num_steps))
        if step.plan is not None and step.plan.from_text and self._promised:
            promises, promised = self._promised.pop(0)
            promises.learn(promised, len(step.tokens) - 1)
        self.follow(self._awaited, self._seen, step.tokens)
        self._seen = None
        self._tally.count(step, num_steps)

    def follow(
        self, awaited: AwaitedDrafts, seen: SeenDrafts | None, tokens: Sequence[int]
    ) -> None:
        """Learn from a step of any text with the same plan, but for its time.

        Args:
            awaited: Earlier drafts of the text.
            seen: Drafts of the step; None without any.
            tokens: Tokens of the step.
        """
        if seen is not None:
            self._time.compare(self._expected, len(tokens))
            # Where none are in use, looking at drafts has been paid for.
            seen = seen if self._best is PLAIN or self._time.is_left else None
        # Tokens that no drafts await teach nothing; those of outcomes not yet learnt from may.
        if seen is not None or awaited or self._outcomes:
            self._outcomes.append(Outcome(seen, tokens, awaited))

    def conclude(self) -> Experience:
        """The experience of this text, which ends, with the times of its last steps."""
        self._catch_up()
        self._learn_times()
        return self.experience

    @property
    def is_used(self) -> bool:
        """Whether any step was by it."""
        return bool(self._tally)

    def shapes(self) -> list[ShapeStats]:
        """See `DecodingStats.shapes`; drafts in the order of their shapes."""
        self._catch_up()
        return self._tally.shapes(self._prices, self._costs, self.experience.slowdowns)

    def _decide(self) -> None:
        """Find the choice with the most expected tokens per second, and what exploring rests on."""
        self._prices.update(self.experience.slowdowns, self.experience.in_vain.of(1))
        # The best choice and its speed, and the best plan whose number of nodes is fixed: its speed
        # and place, and its gain as a share of what it would have to gain.
        was_drafting = self._best.plan is not None
        self._best, self._rate = PLAIN, (1 + MARGIN) / self._prices.plain
        self._best_fixed: tuple[float, tuple[int, ...]] = 0.0, (0, 0, 0)
        self._hope = self._expected = 1.0
        self._extra = 0.0  # seconds that a survey takes beyond drafts in use
        if not self._costs.level:
            return
        gains = self.experience.gains
        self._best_fixed = highest((1 + gains.mean) / self._prices.step)
        speed, (w, length, size) = self._best_fixed
        needed = max(1e-6, self._prices.step[w, length, size] / self._prices.plain - 1)
        self._hope = max(LEAST_HOPE, min(1.0, float(gains.mean[w, length, size] / needed)))
        if speed > self._rate:
            self._best, self._rate = Choice(PLANS[w, length], SIZES[size]), speed
            self._expected = 1 + float(gains.mean[w, length, size])
        drafts, relative = gains.chosen
        speeds = (1 + drafts) / (relative * self._prices.fewest) * self._offered
        speed, (w, length) = highest(speeds)
        if speed > self._rate:
            self._best, self._rate = Choice(PLANS[w, length]), speed
            self._expected = 1 + float(drafts[w, length])
        if self._best.plan is not None:
            drafting, own = self._prices.drafting, PLACES[self._best.plan.shape]
            self._extra = drafting.item(PLACES[self._longest.shape]) - drafting.item(own)
        if was_drafting != (self._best.plan is not None):
            self.experience.until_trial = min(self.experience.until_trial, TRIAL_EVERY)

    @property
    def _is_trying(self) -> bool:
        """Whether drafts are in a trial, whose steps teach as much together, in less time."""
        return self._best is PLAIN and -TRIAL < self.experience.until_trial <= 0

    @property
    def _num_taken(self) -> int:
        return sum(taken.num_steps for taken in self._taken)

    def _explore(self, best: Choice) -> Choice:
        """The best choice, or now and then one that shows more."""
        if not self._costs.level:
            return best
        if self.experience.plain_due:
            self.experience.plain_due -= 1
            return PLAIN
        self.experience.until_trial -= 1
        self._until_survey -= 1
        if self.experience.until_trial <= -TRIAL:
            self.experience.until_trial = self._until_trial(best)
        if best.plan is None:
            return self._explore_drafts()
        if self.experience.until_trial <= 0 and self._rate * self._prices.plain < CLOSE:
            return PLAIN
        if self._until_survey <= 0 and self._credits.pay(self._extra):
            self._until_survey = SURVEY_EVERY
            return best._replace(plan=self._longest)
        return best

    def _steps_ahead(self) -> int:
        """How many steps after a plain one are plain whatever they show, unless lookups differ.

        Between two forward passes the host finds nothing in its caches: to think of several steps
        at once takes far less than of one after the other.
        """
        is_parked = self._best.plan is None and not self.experience.plain_due
        if not is_parked or self._seen is not None or self._outcomes:
            return 0
        soonest = LOOK_AGAIN - self._num_taken
        if self._costs.level:
            soonest = min(soonest, self.experience.until_trial)
            if self._until_survey > 0:
                soonest = min(soonest, self._until_survey)
        return max(0, soonest - 1)

    def _catch_up(self) -> None:
        """Take in the steps that were decided in advance."""
        num_decided, self._ahead, self._left = self._ahead - self._left, 0, 0
        self.experience.until_trial -= num_decided
        self._until_survey -= num_decided
        rested, self._rested = self._rested, []
        if len(rested) >= SEVERAL:
            self._take_in(together(rested), len(rested))
        else:
            for step in rested:
                self._take_in(step)

    def _until_trial(self, best: Choice) -> int:
        """Steps until the next trial, after one."""
        is_drafting, steps = best.plan is not None, TRIAL_EVERY
        if is_drafting:
            lead = (self._rate * self._prices.plain - 1) / (CLOSE - 1)
            steps = max(TRIAL_SOONEST, int(TRIAL_EVERY * min(1.0, lead)))
        is_near = not is_drafting and self._best_fixed[0] * self._prices.plain > NEAR
        calm = 1 if is_near else self.experience.calm[is_drafting]
        self.experience.calm = {is_drafting: min(2 * calm, MOST_CALM), not is_drafting: 1}
        return steps * calm

    def _explore_drafts(self) -> Choice:
        """Plain decoding, or now and then drafts that are looked at, or verified in a trial."""
        speed, (w, length, size) = self._best_fixed
        if self.experience.until_trial <= 0 and speed * self._prices.plain * CLOSE > 1:
            seconds = self._prices.step[w, length, size]
            loss = TRIAL * seconds * max(0.0, 1 - speed * self._prices.plain)
            if self.experience.until_trial < 0 or self._credits.trials >= loss:
                return Choice(PLANS[w, length], SIZES[size])
            self.experience.until_trial = 1
        if self._until_survey > 0 or not self._credits.pay(float(self._prices.drafting[w, length])):
            return PLAIN
        if self._until_survey <= 1 - LOOKS:
            self._until_survey = LOOK_EVERY
        return Choice(PLANS[w, length], num_nodes=1)

    def _looks_up(self, outlook: Sequence[float] | None) -> bool:
        """Whether drafts out of the text, of these probabilities, promise the most speed.

        What they promise is kept, to be compared with what they bring.
        """
        if not outlook:
            return False
        tokens = list(accumulate(outlook, initial=0.0))
        is_further = self._next.plan is not None and self._next.plan.from_text
        promises = self.experience.promises[is_further]
        rate, wait = self._rate * self.experience.lookups.of(1), self._costs.wait
        drafts = [tokens[min(size, len(tokens)) - 1] for size in SIZES]
        value, promised = max(
            (1 + promises.share * count - rate * (seconds + wait), count)
            for count, seconds in zip(drafts, self._prices.verify, strict=True)
        )
        if value > 0:
            self._promised.append((promises, promised))
        return value > 0

    def _learn_times(self) -> None:
        """Learn from the times of the steps since the last time; waits for nothing."""
        taken, self._taken = self._taken, []
        for one in taken:
            self._credits.take(one, self._prices, self._hope, self._best.plan is not None)
            learn_time(one, self._costs, self._prices, self.experience)

    def _learn(self) -> None:
        """Take in the steps since the last time."""
        self._learn_times()
        outcomes, self._outcomes = self._outcomes, []
        calibration = self.experience.calibration
        for seen, tokens, awaited in outcomes:
            if seen is not None:
                awaited.add(seen)
            awaited.teach(calibration, tokens)
        calibration.fit()
        drafts = [outcome.seen for outcome in outcomes if outcome.seen is not None]
        prices, rate = self._prices, self._rate
        for seen in drafts:
            best, chosen = expected_drafts(seen.drafts, seen.chances(calibration), seen.plan.shape)
            self.experience.gains.learn(best, chosen, prices.looking, prices.fewest, rate)
