"""Estimates of a policy, which it learns from steps, and which one sequence hands to the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

from mlx_redrafter.decoding.delivery import ShapeStats
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.calibration import Calibration, ExpectedDrafts, ScoredDrafts
from mlx_redrafter.policy.plans import (
    EMPTY,
    ESTIMATED,
    SHADOW,
    SPARE,
    UNEVEN,
    Choice,
    CurrentCosts,
    Evenness,
    Guard,
    TimeRatios,
    checked,
)

# Share of the time for exploring, half for drafts and half for switches.
EXPLORE = 0.01
# Share of the time for learning on the host; the cost of one plain step is lent.
LEARNING = 0.03
# Share of the time for lookups of all texts of a batch, while they do not pay.
LOOKUPS = 0.01


@dataclass
class Budget:
    """Seconds that are saved for exploration, and for the host's work.

    ``drafts`` is for shadow drafts and larger ones, which were paid for ``num_larger`` times, and
    ``lookups`` for those of a batch.
    """

    drafts: float = 0.0
    switches: float = 0.0
    learning: float = 0.0
    lookups: float = 0.0
    num_larger: int = 0

    def save(self, seconds: float, most: float) -> None:
        """Save shares of a step's cost, up to ``most`` seconds for each purpose."""
        self.drafts = min(most, self.drafts + EXPLORE / 2 * seconds)
        self.switches = min(most, self.switches + EXPLORE / 2 * seconds)
        self.learning = min(most, self.learning + LEARNING * seconds)
        self.lookups = min(most, self.lookups + LOOKUPS * seconds)

    def pay_drafts(self, seconds: float, is_larger: bool) -> bool:
        """Pay for shadow drafts, or larger ones, if there is enough; return whether there was."""
        if self.drafts < seconds:
            return False
        self.drafts -= seconds
        self.num_larger += is_larger
        return True

    def pay_switch(self, seconds: float) -> bool:
        """Spend all that is saved for switches if that is enough; return whether it was.

        Nothing is kept: a switch that gains would pay for the next one.
        """
        if self.switches < seconds:
            return False
        self.switches = 0.0
        return True

    def pay_learning(self, seconds: float) -> None:
        """Pay for the host's time."""
        self.learning -= seconds

    def pay_lookups(self, seconds: float) -> None:
        """Pay for lookups that were not chosen."""
        self.lookups -= seconds


@dataclass
class PolicyState:
    """Estimates that one sequence hands to the next; the guard is None before the first step."""

    calibration: Calibration = field(default_factory=Calibration)
    drafts: ExpectedDrafts = field(default_factory=ExpectedDrafts)
    ratios: TimeRatios = field(default_factory=TimeRatios)
    guard: Guard | None = None
    budget: Budget = field(default_factory=Budget)
    evenness: Evenness = field(default_factory=Evenness)

    def stored(self) -> dict[str, Any]:
        """Return the estimates as numbers, for a file; no text is among them."""
        return {
            "calibration": self.calibration.stored(),
            "drafts": self.drafts.stored(),
            "ratios": self.ratios.stored(),
            "guard": None if self.guard is None else self.guard.stored(),
            "budget": [max(0.0, self.budget.drafts), max(0.0, self.budget.switches)],
            "evenness": self.evenness.shares,
        }

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> PolicyState:
        """Begin with the numbers of a file, of which each part weighs half at most.

        Raise ValueError, KeyError, TypeError or AttributeError if they are damaged.
        """
        drafts, switches = checked(stored["budget"], (2,), 0.0, 3600 * SPARE).tolist()
        guard = stored["guard"]
        return cls(
            Calibration.restored(stored["calibration"]),
            ExpectedDrafts.restored(stored["drafts"]),
            TimeRatios.restored(stored["ratios"]),
            None if guard is None else Guard.restored(guard),
            Budget(drafts, switches),
            Evenness(checked(stored["evenness"], (2,), 1e-3, 1.0).tolist()),
        )

    def for_next(self) -> PolicyState:
        """Return a copy for the next sequence, in which counts weigh half."""
        following = deepcopy(self)
        following.drafts.fade()
        following.ratios.fade()
        if following.guard is not None:
            following.guard.fade()
        return following

    def without_times(self) -> PolicyState:
        """Return a copy for another number of sequences, whose steps were not timed."""
        of_networks, of_lookups = self.evenness.shares
        evenness = Evenness((of_networks, min(UNEVEN, of_lookups)))
        return replace(deepcopy(self), ratios=TimeRatios(ESTIMATED), guard=None, evenness=evenness)


class Learner:
    """Updates the estimates: costs at once, drafts when there is time for it.

    ``totals`` has steps, tokens, expected tokens, seconds and expected seconds by kind of step.
    """

    def __init__(self, costs: CurrentCosts, state: PolicyState):
        self.state = state
        self._costs = costs
        costs.update(state.ratios)
        self.guard = state.guard = state.guard or Guard(costs.plain)
        # Drafts to learn from, by sequence and step.
        self.outcomes: list[list[ScoredDrafts]] = []
        # The step before, and its seconds if it ended a row of steps of one node.
        self._before: Step | None = None
        self._last_of_row: float | None = None
        self.totals = defaultdict[tuple[DraftPlan | None, int], list[float]](lambda: [0.0] * 5)

    def observe_time(
        self, step: Step, choice: Choice, num_tokens: float, least: float, in_row: bool
    ) -> None:
        """Learn from the cost of a step, at once: what is verified next depends on it.

        ``num_tokens`` is the mean over the sequences of a batch, and ``least`` the number of the
        slowest one, for which the cost was paid. ``in_row`` is whether a plain step comes next.
        """
        plan, kind, state = step.plan, step.num_nodes, self.state
        timed = self._costs.timed(plan, kind, choice.waits)
        if plan is not None and kind == 1:
            kind = EMPTY if plan.from_text or choice.waits else SHADOW
        expected = timed * state.ratios.of(kind)
        seconds = expected if step.seconds is None else step.seconds
        key, news = (plan, step.num_nodes), (1, num_tokens, choice.tokens, seconds, expected)
        self.totals[key] = list(map(add, self.totals[key], news))
        self.guard.count(num_tokens)
        alone = self._time_alone(step, in_row)
        if step.seconds is None:
            return
        state.budget.save(seconds, SPARE * self._costs.plain)
        if alone is not None:
            state.ratios.learn(kind, alone / timed)
        if plan is not None:
            cost = expected if alone is None else alone
            self.guard.learn_drafted(cost, least)
            if step.num_nodes > 1:
                state.evenness.learn(plan.from_text, least, num_tokens)
            if plan.from_text:  # what it has gained pays for further ones
                state.budget.lookups += max(0.0, least * self._costs.plain - cost)
        elif alone is not None:
            self.guard.learn_plain(alone)

    def _time_alone(self, step: Step, in_row: bool) -> float | None:
        """Return the seconds of a step without those of its neighbours, if they can be told apart.

        A plain step is dispatched before the one before it is read, if that has one node. MLX's CPU
        back end waits for most of what it dispatches. So in a row of steps of one node, the first
        seems longer and the last, which no plain step follows, shorter than it is.
        """
        before, self._before = self._before, step
        last_of_row, self._last_of_row = self._last_of_row, None
        if step.seconds is None:
            return None
        if step.plan is None:
            if not in_row and before is not None and before.num_nodes == 1:
                self._last_of_row = step.seconds
            return step.seconds if in_row and before is not None and before.plan is None else None
        if not in_row or step.num_nodes > 1:
            return step.seconds
        if last_of_row is None:
            return None
        # Drafts of which none is verified begin a row; what is too much, the row before lacks.
        return max(0.0, last_of_row + step.seconds - self._costs.plain)

    def observe_tokens(self, drafts: list[ScoredDrafts], tokens: Sequence[int]) -> None:
        """Note the tokens of a sequence's step, to learn while the device is busy.

        ``drafts`` are those that the sequence may learn from; `learn` removes the others.
        """
        for scored in drafts:
            scored.extend(tokens)
        if drafts:
            self.outcomes.append(drafts)

    def learn(self, rate: float) -> bool:
        """Learn from the drafts of all steps since the last time, unless time is short.

        Return whether the estimates have changed. ``rate`` is that of the best choice.
        """
        outcomes, self.outcomes, state = self.outcomes, [], self.state
        is_late = state.budget.learning < -self._costs.plain
        for drafts in outcomes:
            for scored in () if is_late else drafts:
                if not scored.following:
                    continue
                if scored.is_new:
                    scored.score(state.calibration)
                    state.drafts.learn(scored, self._costs, rate)
                scored.follow(state.calibration)
            drafts[:] = [one for one in drafts if one.is_open]
        if not is_late:
            state.calibration.fit()
        return not is_late

    def shapes(self) -> list[ShapeStats]:
        """Return the statistics of every kind of step: plain ones first, then by shape."""
        plain = self._costs.plain
        found = [] if (None, 1) in self.totals else [ShapeStats(None, plain, 0, 0, plain, 0.0)]
        for (plan, num_nodes), total in sorted(self.totals.items(), key=_place_of_kind):
            steps, tokens, expected, seconds, expected_seconds = total
            kind = None if plan is None else replace(plan, num_nodes=num_nodes)
            means = seconds / steps, int(steps), int(tokens), expected_seconds / steps
            found.append(ShapeStats(kind, *means, expected))
        return found


def _place_of_kind(item: tuple[tuple[DraftPlan | None, int], object]) -> tuple[int, ...]:
    (plan, num_nodes), _ = item
    return () if plan is None else (plan.from_text, plan.shape.width, plan.shape.length, num_nodes)
