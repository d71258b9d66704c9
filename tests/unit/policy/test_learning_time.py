"""When the host learns from drafts."""

from __future__ import annotations

from mlx_redrafter.policy.learning_time import (
    AT_FIRST,
    EVERY,
    LACKING,
    MOST_OF_STEP,
    SHARE,
    LearningTime,
)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _learn(time: LearningTime, clock: Clock, seconds: float) -> None:
    with time.spent():
        clock.now += seconds


def test_there_is_some_time_at_first_and_then_a_share_of_all() -> None:
    clock = Clock()
    time = LearningTime(clock, 1.0)
    _learn(time, clock, 2 * AT_FIRST)
    assert not time.is_left
    time.take(AT_FIRST / SHARE)
    assert time.is_left


def test_where_steps_are_short_there_is_less_at_first() -> None:
    clock = Clock()
    time = LearningTime(clock, AT_FIRST)
    _learn(time, clock, 0.9 * MOST_OF_STEP * AT_FIRST)
    assert time.is_left
    _learn(time, clock, 0.2 * MOST_OF_STEP * AT_FIRST)
    assert not time.is_left


def test_drafts_that_bring_less_than_expected_are_learnt_from_beyond_that() -> None:
    clock = Clock()
    time = LearningTime(clock, 1.0)
    _learn(time, clock, 2 * AT_FIRST)
    time.compare(LACKING, LACKING + 2)
    time.compare(LACKING, 1)
    assert not time.is_left, "chance"
    time.compare(LACKING, 1)
    time.compare(LACKING, 1)
    assert time.is_left
    for _ in range(8):
        time.compare(LACKING, LACKING)
    assert not time.is_left, "they bring it now"


def test_short_steps_are_learnt_from_together() -> None:
    clock = Clock()
    time = LearningTime(clock, 1.0)
    assert time.is_due
    _learn(time, clock, 1e-4)
    time.take(0.6 * EVERY)
    assert not time.is_due
    time.take(0.6 * EVERY)
    assert time.is_due


def test_a_step_in_which_the_host_learnt_is_no_measure_where_others_go_without() -> None:
    clock = Clock()
    time = LearningTime(clock, 1.0)
    assert not time.take(1.0)
    _learn(time, clock, 0.2)
    assert time.take(1.0)
    _learn(time, clock, 0.2)
    assert not time.take(1.0), "all are learnt from"
    assert not time.take(1.0)
    _learn(time, clock, 0.01)
    assert not time.take(1.0), "it took next to nothing"
