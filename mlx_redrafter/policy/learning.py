"""Learning: estimates of a policy, updated from the steps of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import add

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.decoding.stats import ShapeStats
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.plans import Choice
from mlx_redrafter.policy.scored_drafts import ScoredDrafts
from mlx_redrafter.policy.state import PolicyState
from mlx_redrafter.policy.step_times import EMPTY, SHADOW, SPARE, CurrentCosts

# Totals of a kind of step before its first one.
_NONE = (0.0,) * 5


class Learner:
    """Updates the estimates: costs at once, drafts when there is time for it.

    Args:
        costs: Current costs of steps.
        state: The estimates.

    Attributes:
        state: The estimates.
        guard: Losses of drafting, as measured.
    """

    def __init__(self, costs: CurrentCosts, state: PolicyState):
        self.state = state
        self._costs = costs
        costs.update(state.ratios)
        self.guard = state.begin_guard(costs.plain)
        # Drafts to learn from, by sequence and step.
        self._outcomes: list[list[ScoredDrafts]] = []
        # The step before, and its seconds if it ended a row of steps of one node.
        self._before: Step | None = None
        self._last_of_row: float | None = None
        # Steps, tokens, expected tokens, seconds and expected seconds by kind of step.
        self._totals: dict[tuple[DraftPlan | None, int], list[float]] = {}

    @property
    def has_steps(self) -> bool:
        """Whether any step was observed."""
        return bool(self._totals)

    @property
    def has_news(self) -> bool:
        """Whether there are drafts to learn from."""
        return bool(self._outcomes)

    def observe_time(self, step: Step, choice: Choice, num_tokens: float, in_row: bool) -> None:
        """Learn from the cost of a step, at once: what is verified next depends on it.

        Args:
            step: The step.
            choice: The choice that it was made for.
            num_tokens: Its tokens; their mean over the sequences of a batch.
            in_row: Whether a plain step comes after it.
        """
        plan, kind, state = step.plan, step.num_nodes, self.state
        timed = self._costs.timed(plan, kind, choice.waits)
        if plan is not None and kind == 1:
            kind = EMPTY if plan.from_text else SHADOW
        expected = timed * state.ratios.of(kind)
        seconds = expected if step.seconds is None else step.seconds
        key, news = (plan, step.num_nodes), (1, num_tokens, choice.tokens, seconds, expected)
        self._totals[key] = list(map(add, self._totals.get(key, _NONE), news))
        self.guard.count(num_tokens)
        alone = self._time_alone(step, in_row)
        if step.seconds is None:
            return
        state.budget.save(seconds, SPARE * self._costs.plain)
        if alone is not None:
            state.ratios.learn(kind, alone / timed)
        if plan is not None:
            self.guard.learn_drafted(expected if alone is None else alone, num_tokens)
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

        Args:
            drafts: Drafts of the sequence that may be learned from; `learn` removes the others.
            tokens: The tokens.
        """
        for scored in drafts:
            scored.extend(tokens)
        if drafts:
            self._outcomes.append(drafts)

    def learn(self, rate: float) -> bool:
        """Learn from the drafts of all steps since the last time, unless time is short.

        Args:
            rate: Tokens per second of the best choice.

        Returns:
            Whether the estimates have changed.
        """
        outcomes, self._outcomes, state = self._outcomes, [], self.state
        is_late = state.budget.learning < -self._costs.plain
        for drafts in outcomes:
            for scored in () if is_late else drafts:
                if not scored.has_news:
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
        found = [] if (None, 1) in self._totals else [ShapeStats(None, plain, 0, 0, plain, 0.0)]
        for (plan, num_nodes), total in sorted(self._totals.items(), key=_place_of_kind):
            steps, tokens, expected, seconds, expected_seconds = total
            kind = None if plan is None else replace(plan, num_nodes=num_nodes)
            means = seconds / steps, int(steps), int(tokens), expected_seconds / steps
            found.append(ShapeStats(kind, *means, expected))
        return found


def _place_of_kind(item: tuple[tuple[DraftPlan | None, int], object]) -> tuple[int, ...]:
    (plan, num_nodes), _ = item
    return () if plan is None else (plan.from_text, plan.shape.width, plan.shape.length, num_nodes)
