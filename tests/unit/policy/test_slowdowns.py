"""How much slower steps are than when they were timed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.policy.slowdowns import FORGET_AFTER, Slowdowns

PLAIN, CHAIN, TREE, LARGE = SIZES = (1, 4, 6, 16)


def _learnt(*steps: tuple[int, float]) -> dict[int, float]:
    slowdowns = Slowdowns(SIZES)
    for num_nodes, ratio in steps:
        slowdowns.learn(num_nodes, ratio)
    return dict(zip(SIZES, slowdowns.factors, strict=True))


def test_nothing_is_slower_until_it_is_seen() -> None:
    assert _learnt() == dict.fromkeys(SIZES, 1.0)
    assert _learnt(*((size, 1.0) for size in SIZES)) == pytest.approx(dict.fromkeys(SIZES, 1.0))


def test_what_slows_two_sizes_down_slows_all_until_they_show_otherwise() -> None:
    found = _learnt(*[(CHAIN, 1.0), (TREE, 1.0)] * 20, *[(CHAIN, 1.5), (TREE, 1.5)] * 20)
    assert found == pytest.approx(dict.fromkeys(SIZES, 1.5), rel=0.06)


def test_calculated_times_of_trees_err_alike_and_say_little_of_plain_steps() -> None:
    slowdowns = Slowdowns(SIZES, are_calculated=True)
    for num_nodes, ratio in [(PLAIN, 1.0)] * 4 + [(TREE, 2.5)] * 12:
        slowdowns.learn(num_nodes, ratio)
    found = dict(zip(SIZES, Slowdowns(SIZES, slowdowns).factors, strict=True))
    assert found[PLAIN] == pytest.approx(1.0, abs=0.1)
    assert found[CHAIN] == found[LARGE] == pytest.approx(2.5, rel=0.15)


def test_a_spell_of_other_work_comes_and_goes_for_all_sizes() -> None:
    known = [(CHAIN, 1.0), (TREE, 1.0)] * 20
    slow = _learnt(*known, *[(TREE, 2.0)] * 12)
    assert slow[TREE] == pytest.approx(2.0, rel=0.1)
    assert slow[CHAIN] == pytest.approx(2.0, rel=0.2)
    over = _learnt(*known, *[(TREE, 2.0)] * 12, *[(TREE, 1.0)] * 12)
    assert over[CHAIN] == pytest.approx(1.0, rel=0.1)


def test_a_wrong_timing_is_told_from_a_slow_machine_by_other_sizes() -> None:
    found = _learnt(*[(LARGE, 1.5), (CHAIN, 1.0)] * 80)
    assert found[LARGE] == pytest.approx(1.5, rel=0.01)
    assert found[CHAIN] == pytest.approx(1.0, rel=0.01)
    assert found[PLAIN] <= 1.01


def test_what_a_size_takes_beyond_others_is_interpolated_by_nodes() -> None:
    found = _learnt(*[(LARGE, 1.5), (CHAIN, 1.0)] * 80)
    assert found[TREE] == pytest.approx(1 + 0.5 * 2 / 12, rel=0.01)


def test_what_other_work_on_the_machine_did_to_a_size_is_forgotten() -> None:
    disturbed = [(CHAIN, 1.0), (LARGE, 2.0)] * 60
    assert _learnt(*disturbed, *[(PLAIN, 1.0)] * 50)[LARGE] == pytest.approx(2.0, rel=0.1)
    assert _learnt(*disturbed, *[(CHAIN, 1.0)] * FORGET_AFTER)[LARGE] == pytest.approx(2, rel=0.1)
    half = _learnt(*disturbed, *[(CHAIN, 1.0)] * (FORGET_AFTER + 1))
    assert half[LARGE] == pytest.approx(1.5, rel=0.1)
    gone = _learnt(*disturbed, *[(CHAIN, 1.0)] * (5 * FORGET_AFTER + 5))
    assert gone[LARGE] == pytest.approx(1.0, rel=0.1)


def test_one_step_that_waited_changes_little() -> None:
    assert _learnt(*[(TREE, 1.0)] * 20, (TREE, 100.0))[TREE] < 1.05


def test_the_typical_one_of_several_steps_says_more_than_one_step() -> None:
    one, several = Slowdowns(SIZES), Slowdowns(SIZES)
    for slowdowns, num_steps in ((one, 1), (several, 7)):
        for _ in range(2):  # a single one may have waited
            slowdowns.learn(PLAIN, 2.0, num_steps)
    assert 1.2 < one.of(PLAIN) < several.of(PLAIN) < 2.0


def test_half_of_what_slowed_all_steps_down_is_carried_over() -> None:
    before = Slowdowns(SIZES)
    for size, ratio in [(CHAIN, 1.0), (TREE, 1.0)] * 40 + [(CHAIN, 2.0), (TREE, 2.0)] * 40:
        before.learn(size, ratio)
    after = Slowdowns(SIZES, before)
    assert after.factors == pytest.approx([1.5] * len(SIZES), rel=0.05)
    assert before.of(CHAIN) == pytest.approx(2.0, rel=0.05)


def test_what_one_size_takes_beyond_others_is_carried_over() -> None:
    before = Slowdowns(SIZES)
    for size, ratio in [(CHAIN, 1.0), (LARGE, 1.5)] * 80:
        before.learn(size, ratio)
    assert Slowdowns(SIZES, before).of(LARGE) == pytest.approx(1.5, rel=0.1)


def test_a_lasting_change_is_believed() -> None:
    assert _learnt(*[(TREE, 1.0)] * 20, *[(TREE, 10.0)] * 200)[TREE] == pytest.approx(10, rel=0.01)


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.floats(0.0, 1e6, allow_subnormal=False))))
def test_no_time_makes_a_factor_that_is_none(steps: list[tuple[int, float]]) -> None:
    assert all(0 < factor < float("inf") for factor in _learnt(*steps).values())


def test_steps_in_use_show_that_timing_was_disturbed() -> None:
    def shown(count: int, ratio: float) -> bool:
        slowdowns = Slowdowns(SIZES)
        for _ in range(count):
            slowdowns.learn(TREE, ratio)
        return slowdowns.show_long_times

    assert shown(40, 0.5)
    assert not shown(5, 0.5)
    assert not shown(40, 0.9)
    assert not shown(40, 3.0)
