"""Steps are timed from outcome to outcome, without those that waited for the caller."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlx_redrafter.decoding import delivery
from mlx_redrafter.decoding.delivery import StepClock


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    time = Time()
    monkeypatch.setattr(delivery, "time", time)
    return time


def _step(clock: StepClock, time: Time, seconds: float, away: float = 0.0) -> float | None:
    clock.leave_out(away)
    time.now += away
    time.now += seconds - away
    return clock.lap()


def test_a_step_lasts_from_one_outcome_to_the_next(time: Time) -> None:
    clock = StepClock()
    assert [_step(clock, time, s) for s in (1.0, 0.5, 2.0)] == [None, 0.5, 2.0]


def test_a_caller_who_takes_time_leaves_the_step_unknown(time: Time) -> None:
    clock = StepClock()
    _step(clock, time, 1.0)
    assert _step(clock, time, 1.0, away=0.05) == 1.0
    assert _step(clock, time, 1.0, away=0.5) is None
    assert _step(clock, time, 1.0) == 1.0, "forgiven with the next step"
