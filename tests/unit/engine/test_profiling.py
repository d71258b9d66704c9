"""Timing steps: every kind gets its turns, and first steps and disturbed ones do not count."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter import Drafter, load
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.engine import profiling
from mlx_redrafter.engine.profiling import PLAIN, READ, VERIFY, Kind, Seconds
from mlx_redrafter.engine.stored_costs import CONTEXT
from mlx_redrafter.policy.plans import SIZES
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from tests.helpers.models import random_drafter, tiny_llama

KINDS = (PLAIN, VERIFY[2], READ)


def _rounds(seconds: Callable[[Kind, int, int], float], pause: float = 0.0) -> list[Seconds]:
    """Play a schedule on a machine whose steps cost ``seconds`` by kind, round and step of a turn.

    The policy chooses every step before it observes the previous one; ``pause`` is added to the
    clock per step.
    """
    now, count = 0.0, 0
    schedule = profiling._Schedule(KINDS, clock=lambda: now)
    plan = schedule.choose(None)
    while not schedule.is_done:
        following = schedule.choose(None)
        round_, place = divmod(count, profiling.STEPS * len(KINDS))
        kind, step = divmod(place, profiling.STEPS)
        assert plan == KINDS[kind].plan
        now += pause
        schedule.observe(Step(plan, 2, [1], seconds(KINDS[kind], round_, step)))
        plan, count = following, count + 1
    return schedule.rounds


def test_the_steps_inside_a_turn_count() -> None:
    """The first steps of a turn are warm-ups, and its ends partly measure the neighbours."""
    first = {kind: 1.0 + place for place, kind in enumerate(KINDS)}
    rounds = _rounds(lambda kind, _, step: first[kind] if step in (2, 3) else 99.0)
    assert rounds == [first] * profiling.ROUNDS


def test_disturbed_rounds_are_followed_by_others_up_to_a_bound() -> None:
    rng = random.Random(3)

    def once(kind: Kind, number: int, _: int) -> float:
        return (5.0 if kind == VERIFY[2] and number == 0 else 1.0) * rng.uniform(0.99, 1.01)

    rounds = _rounds(once)
    assert len(rounds) == profiling.ROUNDS + 1
    assert not profiling.is_doubtful(rounds)
    assert max(profiling.fastest(rounds).values()) < 1.1
    rounds = _rounds(lambda kind, number, _: 2.0**-number)
    assert len(rounds) == profiling.MAX_ROUNDS
    assert profiling.is_doubtful(rounds)


def test_a_step_without_a_time_leaves_the_others_of_its_turn() -> None:
    """Stored times must be finite, or every run would time again."""
    schedule = profiling._Schedule(KINDS)
    for number in range(profiling.STEPS * len(KINDS)):
        schedule.choose(None)
        seconds = None if number % profiling.STEPS == 2 else 1.0
        schedule.observe(Step(schedule._kind(number).plan, 1, [1], seconds))
    assert schedule.rounds == [dict.fromkeys(KINDS, 1.0)]


def test_a_step_that_costs_more_than_one_that_does_more_leaves_doubt() -> None:
    """So a single round of a large model, whose turns cannot differ, leaves doubt, too."""
    usual = {PLAIN: 1.0, VERIFY[2]: 2.0, VERIFY[8]: 2.1, READ: 2.3}
    assert not profiling.is_doubtful([usual])
    assert profiling.is_doubtful([usual | {VERIFY[2]: 3.0}])
    assert profiling.is_doubtful([usual | {PLAIN: 3.0}])


@pytest.mark.parametrize(("share", "expected"), [(0.3, 3), (0.6, 1), (3.0, 1)])
def test_no_round_begins_that_would_end_too_late(share: float, expected: int) -> None:
    pause = share * profiling.PATIENCE / (profiling.STEPS * len(KINDS))
    assert len(_rounds(lambda kind, number, _: 2.0**-number, pause)) == expected


def test_drafts_that_would_be_right_leave_all_shapes_at_one_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _, drafter = load()
    assert isinstance(drafter, Drafter)
    target, caches = Target(model), []
    blank_cache = profiling.blank_cache

    def remembered(target: Target, length: int, quantisation: None) -> TreeCache:
        caches.append(blank_cache(target, length))
        return caches[-1]

    monkeypatch.setattr(profiling, "blank_cache", remembered)
    monkeypatch.setattr(profiling, "MAX_ROUNDS", 1)
    profiling.time_steps(target, drafter, CONTEXT)
    steps = profiling.STEPS * len(profiling.kinds_of(drafter))
    assert caches[0].length <= 1.1 * (CONTEXT + steps)


def test_steps_after_a_long_context_are_timed_without_processing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And leave the model alone."""
    monkeypatch.setattr(profiling, "MAX_ROUNDS", 1)
    model, lengths, tokens = tiny_llama(), [], mx.array([[3, 1, 4, 1, 5]])
    before = model(tokens)

    class Watched(type(model)):  # type: ignore[misc]
        def __call__(self, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            lengths.append((tokens.shape[1], kwargs["cache"][0].offset))
            return super().__call__(tokens, *args, **kwargs)  # type: ignore[no-any-return]

    target, stock = Target(model), type(model)
    model.__class__ = Watched
    profiling.time_steps(target, random_drafter(64, 32), 4000)
    model.__class__ = stock
    assert max(tokens for tokens, _ in lengths) == SIZES[-1]
    assert {offset >= 4000 for tokens, offset in lengths if tokens > 1} == {True}
    assert mx.array_equal(model(tokens), before)
