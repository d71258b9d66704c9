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
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_redrafter.config import DraftPlan
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.decoding.stats import ShapeStats
from mlx_redrafter.policy.awaited_drafts import AwaitedDrafts
from mlx_redrafter.policy.candidates import (
    FITS,
    LENGTHS,
    LONGEST,
    LOOKUP,
    PLACES,
    PLANS,
    SHAPES,
    SIZES,
    best_first,
    expected_drafts,
)
from mlx_redrafter.policy.credits import EXPLORE_AT_FIRST, Credits
from mlx_redrafter.policy.experience import Experience
from mlx_redrafter.policy.lessons import Outcome, Taken
from mlx_redrafter.policy.seen_drafts import SeenDrafts
from mlx_redrafter.policy.step_costs import StepCosts
from mlx_redrafter.tree import TokenTree

Floats = npt.NDArray[np.float64]

# Least part of the time for exploring that is used where drafts seem hopeless.
LEAST_HOPE = 0.6
# Steps with drafts between two that show what longer and wider searches would give, and steps from
# one whose drafts are only looked at to the next: plain ones in a row are timed.
SURVEY_EVERY, LOOKS, LOOK_EVERY = 8, 3, 10
# How many times what it should take a step with such drafts takes for it to be no noise.
DEAR = 1.25
# Steps without drafts, or with the best ones, whichever is not in use, that show whether they take
# as long as thought: how many, and after how many, fewer where both seem alike.
TRIAL, TRIAL_SOONEST, TRIAL_EVERY = 4, 16, 128
# How much slower they may seem for a trial.
CLOSE = 1.5
# What a verify takes at least of its timed seconds, whatever its drafts are thought to take.
LEAST_VERIFYING = 0.5
# Share of the time for learning from drafts, and seconds for it at first: where steps take little,
# not every draft is learnt from.
LEARNING_SHARE, LEARNING_AT_FIRST = 0.02, 8e-3
# Steps that teach nothing but their times until those are learnt from: that takes the host's time.
LOOK_AGAIN = 8
# How much faster than plain decoding drafts must seem: times and gains are estimates.
MARGIN = 0.03
_SIZES = np.array(SIZES)


class Choice(NamedTuple):
    """What is drafted and verified next.

    Attributes:
        plan: Plan of the drafts; None for plain decoding.
        num_nodes: Nodes to verify; None to decide that by the drafts' probabilities.
    """

    plan: DraftPlan | None
    num_nodes: int | None = None


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
        # Places of the sizes that were timed, and their seconds then.
        self._places = [SIZES.index(size) for size in costs.verify]
        self._timed_verify = np.array(list(costs.verify.values()))
        self._timed_drafting = np.zeros(FITS.shape[:2])
        for place, shape in SHAPES.items() if costs.level else ():
            self._timed_drafting[place] = costs.drafting(shape)
        self._fits, self._longest = FITS, LONGEST
        if max_length is not None:
            self._fits = FITS & (np.array(LENGTHS) <= max_length)[:, None]
            self._longest = PLANS[PLACES[LONGEST.within(max_length).shape]]
        self._offered = self._fits.any(axis=-1)
        self._credits = Credits(0.0 if before else EXPLORE_AT_FIRST * costs.plain)
        self._until_survey = SURVEY_EVERY // 2
        self._counts: dict[tuple[DraftPlan | None, int], list[int]] = {}
        self._last: DraftPlan | None = None
        self._next = Choice(None)
        self._seen: SeenDrafts | None = None
        # What is to be learnt from.
        self._taken: list[Taken] = []
        self._outcomes: list[Outcome] = []
        self._awaited = AwaitedDrafts()
        # Seconds left for learning; some at first, when there is most to learn.
        self._learning = LEARNING_AT_FIRST
        self._clock = clock
        self._decide()

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        """See `DraftPolicy.choose`."""
        is_taught = any(outcome.seen for outcome in self._outcomes)
        if is_taught or len(self._taken) >= LOOK_AGAIN:
            start = self._clock()
            self._learn()
            self._decide()
            # What times alone change takes little.
            self._learning -= is_taught * (self._clock() - start)
        self._next = Choice(LOOKUP) if self._looks_up(outlook) else self._explore(self._best)
        return self._next.plan

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """See `DraftPolicy.keep`; waits for the drafts where it depends on them."""
        if plan.from_text:
            self.waits = False
            return tree.subtree(self._worth(np.exp(tree.read().scores)))
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
            return tree.subtree(self._worth(seen.chances(self.experience.calibration)))
        most = min(wanted, tree.size)
        if most == 1:
            return tree.first(1)
        return tree.first(max(size for size in self._costs.verify if size <= most))

    def observe(self, step: Step) -> None:
        """See `DraftPolicy.observe`; `choose` learns from it, when the device is busy."""
        # A plain step is dispatched before the outcome of the one before is read, which may wait
        # for both: the first of some plain steps takes twice its time, and the last one none.
        neighbours = self._last, step.plan, self._next.plan
        is_inner = len({plan is None for plan in neighbours}) == 1
        self._last = step.plan
        self._learning += LEARNING_SHARE * (step.seconds or self._plain)
        self._taken.append(Taken(step, is_inner, self.waits))
        self.follow(self._awaited, self._seen, step.tokens)
        self._seen = None
        counts = self._counts.setdefault((step.plan, step.num_nodes), [0, 0])
        counts[0] += 1
        counts[1] += len(step.tokens)

    def follow(
        self, awaited: AwaitedDrafts, seen: SeenDrafts | None, tokens: Sequence[int]
    ) -> None:
        """Learn from a step of any text with the same plan, but for its time.

        Args:
            awaited: Earlier drafts of the text.
            seen: Drafts of the step; None without any.
            tokens: Tokens of the step.
        """
        self._outcomes.append(Outcome(seen if self._learning >= 0 else None, tokens, awaited))

    def conclude(self) -> Experience:
        """The experience of this text, which ends, with the times of its last steps."""
        self._learn_times()
        return self.experience

    @property
    def is_used(self) -> bool:
        """Whether any step was by it."""
        return bool(self._counts)

    def shapes(self) -> list[ShapeStats]:
        """See `DecodingStats.shapes`; drafts in the order of their shapes."""
        found = [ShapeStats(None, float(self._plain), *self._counts.get((None, 1), (0, 0)))]
        for (plan, num_nodes), counts in sorted(self._counts.items(), key=_place_of_kind):
            if plan is not None:
                shape = None if plan.from_text else plan.shape
                seconds = self._costs.step(None, num_nodes, waits=False)
                seconds *= self.experience.slowdowns.of(num_nodes)
                seconds += 0.0 if shape is None else float(self._drafting[PLACES[shape]])
                kind = DraftPlan(plan.shape, num_nodes, plan.from_text)
                found.append(ShapeStats(kind, seconds, *counts))
        return found

    def _decide(self) -> None:
        """Find the choice with the most expected tokens per second, and what exploring rests on."""
        self._price()
        # The best choice and its speed, and the best plan whose number of nodes is fixed: its speed
        # and place, and its gain as a share of what it would have to gain.
        self._best, self._rate = Choice(None), (1 + MARGIN) / self._plain
        self._best_fixed: tuple[float, tuple[int, ...]] = 0.0, (0, 0, 0)
        self._hope = 1.0
        if not self._costs.level:
            return
        gains = self.experience.gains
        self._best_fixed = _highest((1 + gains.mean) / self._seconds)
        speed, (w, length, size) = self._best_fixed
        needed = max(1e-6, self._seconds[w, length, size] / self._plain - 1)
        self._hope = max(LEAST_HOPE, min(1.0, float(gains.mean[w, length, size] / needed)))
        if speed > self._rate:
            self._best, self._rate = Choice(PLANS[w, length], SIZES[size]), speed
        speeds = gains.chosen_tokens / gains.chosen_seconds * self._offered
        speed, (w, length) = _highest(speeds)
        if speed > self._rate:
            self._best, self._rate = Choice(PLANS[w, length]), speed

    def _price(self) -> None:
        """Seconds at present: plain steps, drafting (W, L), verifying (S,), both (W, L, S)."""
        costs, factors = self._costs, self.experience.slowdowns.factors
        self._plain = costs.plain * float(factors[0])
        # What slows plain steps down, but for a longer text, slows drafting down as well.
        unverified = self._plain + costs.wait + self._timed_drafting * factors[0]
        unverified *= self.experience.in_vain.of(1)
        self._drafting = np.maximum(0.0, unverified - self._plain - costs.wait)
        self._verify = np.full(len(SIZES), np.inf)
        # What took less than a plain step was timed in a quieter moment.
        self._verify[self._places] = np.maximum(self._plain, self._timed_verify * factors[1:])
        self._seconds = np.where(self._fits, self._verify + self._drafting[..., None], np.inf)

    def _time(self, taken: Taken) -> None:
        """Learn from a step's time how slow steps are at present."""
        step = taken.step
        self._account(step)
        if step.seconds is None:
            return
        is_lookup = step.plan is not None and step.plan.from_text
        if is_lookup and step.num_nodes > 1 and self._costs.level:
            expected = self._verify[SIZES.index(step.num_nodes)] + self._costs.wait
            self.experience.lookups.learn(1, max(1.0, step.seconds / expected))
            if step.seconds > expected:  # which says nothing of a network's trees
                return
        shape = None if step.plan is None or is_lookup else step.plan.shape
        if shape is not None and step.num_nodes == 1 and self._best.plan is None:
            self.experience.looks.learn(1, step.seconds / self._looking(PLACES[shape]))
        if not taken.is_inner:
            return
        wait = self._costs.wait if taken.waits and shape is not None else 0.0
        if (step.num_nodes == 1) == (step.plan is None):
            drafting = 0.0 if shape is None else self._drafting[PLACES[shape]]
            timed = self._costs.step(None, step.num_nodes, waits=False)
            verifying = max(LEAST_VERIFYING * timed, step.seconds - drafting - wait)
            self.experience.slowdowns.learn(step.num_nodes, verifying / timed)
        elif shape is not None:
            drafting = self._timed_drafting[PLACES[shape]] * self.experience.slowdowns.of(1)
            self.experience.in_vain.learn(1, step.seconds / (self._plain + drafting + wait))

    def _account(self, step: Step) -> None:
        """Credit exploring with its share of a step's time, and charge a trial what it lost."""
        is_drafting, plan = self._best.plan is not None, step.plan
        self._credits.earn(self._hope * (step.seconds or self._plain), is_drafting)
        if plan is not None and not (is_drafting or plan.from_text or step.num_nodes == 1):
            seconds = self._seconds[(*PLACES[plan.shape], SIZES.index(step.num_nodes))]
            self._credits.trials -= seconds - len(step.tokens) * self._plain

    def _explore(self, best: Choice) -> Choice:
        """The best choice, or now and then one that shows more."""
        if not self._costs.level:
            return best
        if self.experience.plain_due:
            self.experience.plain_due -= 1
            return Choice(None)
        self.experience.until_trial -= 1
        self._until_survey -= 1
        if self.experience.until_trial <= -TRIAL:
            lead = 1.0 if best.plan is None else (self._rate * self._plain - 1) / (CLOSE - 1)
            self.experience.until_trial = max(TRIAL_SOONEST, int(TRIAL_EVERY * min(1.0, lead)))
        if best.plan is None:
            return self._explore_drafts()
        if self.experience.until_trial <= 0 and self._rate * self._plain < CLOSE:
            return Choice(None)
        if self._until_survey <= 0:
            longest, shape = self._longest.shape, best.plan.shape
            extra = self._drafting[PLACES[longest]] - self._drafting[PLACES[shape]]
            if self._credits.pay(extra):
                self._until_survey = SURVEY_EVERY
                return best._replace(plan=self._longest)
        return best

    def _explore_drafts(self) -> Choice:
        """Plain decoding, or now and then drafts that are looked at, or verified in a trial."""
        speed, (w, length, size) = self._best_fixed
        if self.experience.until_trial <= 0 and speed * self._plain * CLOSE > 1:
            seconds = self._seconds[w, length, size]
            loss = TRIAL * seconds * max(0.0, 1 - speed * self._plain)
            if self.experience.until_trial < 0 or self._credits.trials >= loss:
                return Choice(PLANS[w, length], SIZES[size])
            self.experience.until_trial = 1
        dear = self.experience.looks.of(1)
        looking = self._looking((w, length)) * (dear if dear > DEAR else 1.0)
        if self._until_survey > 0 or not self._credits.pay(looking - self._plain):
            return Choice(None)
        if self._until_survey <= 1 - LOOKS:
            self._until_survey = LOOK_EVERY
        return Choice(PLANS[w, length], num_nodes=1)

    def _looking(self, place: tuple[int, int]) -> float:
        """Seconds that a step takes whose drafts are only looked at, but for `Experience.looks`."""
        return float(self._plain + self._drafting[place])

    def _looks_up(self, outlook: Sequence[float] | None) -> bool:
        """Whether drafts out of the text, of these probabilities, promise the most speed."""
        if not outlook:
            return False
        tokens = list(accumulate(outlook, initial=1.0))
        seconds = (self._verify + self._costs.wait) * self.experience.lookups.of(1)
        needed = (self._rate * seconds).tolist()
        return any(
            tokens[min(size, len(tokens)) - 1] > least
            for size, least in zip(SIZES, needed, strict=True)
        )

    def _worth(self, chances: Floats) -> list[int]:
        """The drafts with the most tokens beyond what their time gives otherwise, the best first.

        Args:
            chances: Probability of each draft that it is accepted, shape (n,), which are there:
                to verify none takes a plain step.
        """
        order = best_first(chances)
        gains = np.concatenate([[0.0], np.cumsum(chances[order])])
        is_there = _SIZES <= len(gains)
        values = gains[np.minimum(_SIZES, len(gains)) - 1] - self._rate * self._verify
        best = int(np.argmax(np.where(is_there, values, -np.inf)))
        num_nodes = SIZES[best] if values[best] > -self._rate * self._plain else 1
        return [int(draft) for draft in order[: num_nodes - 1]]

    def _learn_times(self) -> None:
        """Learn from the times of the steps since the last time; waits for nothing."""
        taken, self._taken = self._taken, []
        for one in taken:
            self._time(one)

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
        unverified = self._drafting + self._plain + self._costs.wait
        for seen in drafts:
            best, chosen = expected_drafts(seen.drafts, seen.chances(calibration), seen.plan.shape)
            seconds = self._seconds + self._costs.wait
            self.experience.gains.learn(best, chosen, seconds, unverified, self._rate)


def _highest(values: Floats) -> tuple[float, tuple[int, ...]]:
    """The highest value and its place."""
    place = np.unravel_index(np.argmax(values), values.shape)
    return float(values[place]), tuple(int(index) for index in place)


def _place_of_kind(item: tuple[tuple[DraftPlan | None, int], object]) -> tuple[int, ...]:
    (plan, num_nodes), _ = item
    return () if plan is None else (plan.from_text, plan.shape.width, plan.shape.length, num_nodes)
