"""What a step takes now, from what it took when timed and what steps took since."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.config import DraftPlan
from mlx_redrafter.policy.step_times import FORGET_AFTER, MOST_CHANGE, StepTimes

CHAIN, TREE, LARGE = DraftPlan.of(1, 4, 4), DraftPlan.of(4, 4, 6), DraftPlan.of(4, 6, 16)
TIMED = {None: 1.0, CHAIN: 1.2, TREE: 1.4, LARGE: 2.0}


def _learnt(*steps: tuple[DraftPlan | None, float]) -> StepTimes:
    times = StepTimes(TIMED)
    for shape, seconds in steps:
        times.learn(shape, seconds)
    return times


def test_steps_take_what_they_took_until_something_else_is_seen() -> None:
    assert dict(StepTimes(TIMED)) == TIMED
    assert dict(_learnt(*TIMED.items())) == pytest.approx(TIMED)


def test_a_slowdown_is_interpolated_by_nodes() -> None:
    times = _learnt(*[(LARGE, 3.0)] * 50)
    assert times[LARGE] == pytest.approx(3.0, rel=0.01)
    assert times[None] == 1.0
    assert times[CHAIN] == pytest.approx(1.2 * (1 + 0.5 * 3 / 15), rel=0.01)


def test_a_shape_that_is_used_needs_no_interpolation() -> None:
    times = _learnt(*[(LARGE, 3.0), (CHAIN, 1.2)] * 50)
    assert times[CHAIN] == pytest.approx(1.2, rel=0.01)
    assert times[TREE] == pytest.approx(1.4 * (1 + 0.5 * 2 / 12), rel=0.01)


def test_what_other_work_on_the_machine_did_to_a_shape_is_forgotten() -> None:
    disturbed = [(LARGE, 4.0)] * 20
    plain, chain = (None, 1.0), (CHAIN, 1.2)
    assert _learnt(*disturbed, *[plain] * 50)[LARGE] == pytest.approx(4.0, rel=0.1)
    assert _learnt(*disturbed, *[chain] * FORGET_AFTER)[LARGE] == pytest.approx(4.0, rel=0.1)
    assert _learnt(*disturbed, *[chain] * (FORGET_AFTER + 1))[LARGE] == pytest.approx(2.0, rel=0.1)


def test_one_step_that_waited_changes_little() -> None:
    times = _learnt(*[(TREE, 1.4)] * 20, (TREE, 100.0))
    assert times[TREE] < 1.2 * 1.4


def test_a_lasting_change_is_believed() -> None:
    times = _learnt(*[(TREE, 1.4)] * 20, *[(TREE, 14.0)] * 100)
    assert times[TREE] == pytest.approx(14.0, rel=0.01)


@given(
    st.lists(st.tuples(st.sampled_from(list(TIMED)), st.floats(1e-6, 1e6, allow_subnormal=False)))
)
def test_times_stay_between_what_was_timed_and_what_was_seen(
    steps: list[tuple[DraftPlan | None, float]],
) -> None:
    times = _learnt(*steps)
    ratios = [1.0, *(seconds / TIMED[shape] for shape, seconds in steps)]
    for shape, seconds in times.items():
        assert min(ratios) * 0.999 <= seconds / TIMED[shape] <= max(ratios) * 1.001
        assert seconds / TIMED[shape] <= MOST_CHANGE ** len(steps) * 1.001
