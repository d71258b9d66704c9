"""Current costs of steps, and the guard of what drafting has lost."""

from __future__ import annotations

import pytest

from mlx_redrafter.policy.plans import (
    LENGTHS,
    LOSS,
    PLACES,
    PLANS,
    SHADOW,
    SIZES,
    SPARE,
    TRUST,
    CurrentCosts,
    Guard,
    StepCosts,
    TimeRatios,
)

COSTS = StepCosts(
    1.0, {size: 1 + 0.1 * size for size in SIZES}, {1: 0.0, 2: 0.0}, {1: 0.1, 2: 0.2}, wait=0.1
)


def _learn(ratios: TimeRatios, kind: int, ratio: float, times: int = 1) -> None:
    for _ in range(times):
        ratios.learn(kind, ratio)


def test_a_size_that_costs_more_than_timed_is_found_out() -> None:
    ratios = TimeRatios()
    for _ in range(20):
        ratios.learn(8, 3.0)
        ratios.learn(1, 1.0)
    assert ratios.of(8) == pytest.approx(3.0, rel=0.15)
    assert ratios.of(1) == pytest.approx(1.0, rel=0.1)
    assert ratios.of(4) < 1.5, "never used"


def test_what_slows_all_steps_is_common_to_those_not_in_use() -> None:
    ratios = TimeRatios()
    _learn(ratios, 8, 1.0, 30)
    _learn(ratios, 1, 1.0, 30)
    for _ in range(10):
        ratios.learn(8, 1.6)
        ratios.learn(1, 1.6)
    assert ratios.of(8) == pytest.approx(1.6, rel=0.1)
    assert ratios.of(4) > 1.35


def test_one_slow_step_changes_nothing() -> None:
    ratios = TimeRatios()
    _learn(ratios, 8, 1.0, 5)
    known = ratios.of(8)
    ratios.learn(8, 20.0)
    assert ratios.of(8) == known
    ratios.learn(8, 1.0)
    assert ratios.of(8) == pytest.approx(1.0, abs=0.01)


def test_the_first_step_counts_if_it_costs_less_than_timed() -> None:
    """Other work makes steps slower, never faster."""
    ratios = TimeRatios()
    ratios.learn(1, 0.5)
    assert ratios.of(1) < 0.75


def test_times_that_are_far_too_long_show() -> None:
    ratios = TimeRatios()
    _learn(ratios, 8, 1.0, 40)
    assert not ratios.are_low
    _learn(ratios, 4, 0.4, 40)
    assert ratios.are_low


def test_the_next_sequence_keeps_own_ratios_and_half_of_the_common_one() -> None:
    ratios = TimeRatios()
    for _ in range(20):
        ratios.learn(8, 3.0)
        ratios.learn(1, 1.5)
    own, before = ratios.of(8) / ratios.of(1), ratios.of(4)
    ratios.fade()
    assert ratios.of(8) / ratios.of(1) == pytest.approx(own)
    assert ratios.of(4) == pytest.approx(before**0.5)


def test_current_costs_are_timed_ones_times_ratios() -> None:
    costs, ratios = CurrentCosts(COSTS), TimeRatios()
    w, n = PLACES[PLANS[0, 2].shape]
    assert costs.step[w, n, 3] == pytest.approx(COSTS.drafting(PLANS[0, 2].shape) + COSTS.verify[4])
    assert costs.waiting[w, n, 3] == pytest.approx(costs.step[w, n, 3] + 0.1)
    assert costs.timed(PLANS[0, 2], 4, waits=True) == pytest.approx(costs.waiting[w, n, 3])
    assert costs.step[0, 0, 2] > 1e6, "a chain of two tokens has one draft"
    for kind in (1, SHADOW, *SIZES):
        _learn(ratios, kind, 2.0, 60)
    before = costs.step[w, n, 3]
    costs.update(ratios)
    assert costs.step[w, n, 3] == pytest.approx(2 * before, rel=0.1)


def test_no_verify_seems_to_cost_less_than_a_plain_step() -> None:
    costs, ratios = CurrentCosts(COSTS), TimeRatios()
    _learn(ratios, 4, 0.2, 40)
    costs.update(ratios)
    assert min(costs.verify) >= costs.plain


def test_plans_longer_than_the_proposer_drafts_are_not_offered() -> None:
    costs = CurrentCosts(COSTS, max_length=4)
    assert costs.offered.any(axis=0).tolist() == [length <= 4 for length in LENGTHS]
    assert not CurrentCosts(StepCosts(1.0, COSTS.verify)).offered.any(), "no network"


def _measured(seconds: float = 1.0) -> Guard:
    guard = Guard(seconds)
    for _ in range(2):
        guard.learn_plain(seconds)
    return guard


def test_the_guard_stops_drafts_that_cost_more_than_they_yield() -> None:
    guard, lost = _measured(), 0.0
    for _ in range(250):
        if guard.allows_drafts:
            guard.learn_drafted(10.0, 1)
            lost += 9
        else:
            guard.learn_plain(1.0)
        guard.count(1)
    assert 9 <= lost <= TRUST + 9 + LOSS * 250


def test_gains_pay_for_losses_and_half_of_them_stays_for_the_next_sequence() -> None:
    guard = _measured()
    guard.learn_drafted(12.0, 1)
    assert not guard.allows_drafts
    guard.fade()
    guard.learn_drafted(6.0, 1)
    assert not guard.allows_drafts
    for _ in range(10):
        guard.learn_drafted(1.0, 4)
    assert guard.allows_drafts


def test_drafting_may_lose_what_it_has_gained_up_to_a_bound() -> None:
    guard, lost = _measured(), 0
    for _ in range(10):
        guard.learn_drafted(1.0, 4)
    while guard.allows_drafts:
        guard.learn_drafted(2.0, 1)
        lost += 1
    assert SPARE + TRUST < lost <= SPARE + TRUST + 1
    for _ in range(1000):  # plain steps make up for losses, and save nothing
        guard.count(1)
    guard.learn_drafted(TRUST + 2, 1)
    assert not guard.allows_drafts


def test_the_guard_goes_by_measured_plain_steps_and_is_careful_before() -> None:
    guard = Guard(2.0)
    assert guard.plain == 1.0
    guard.learn_plain(9.0)
    assert guard.plain == 1.0, "one plain step alone may have been disturbed"
    for _ in range(2):
        guard.learn_plain(1.5)
    assert guard.plain == 1.5
    guard.fade()
    assert guard.plain == 1.5


def test_one_terrible_step_forbids_drafts_for_some_sequences() -> None:
    guard, plain = _measured(), 0
    guard.learn_drafted(1000.0, 1)
    while not guard.allows_drafts:
        guard.fade()
        guard.count(100)
        plain += 1
    assert 3 <= plain <= 8
    guard.learn_drafted(10.0, 1)
    assert not guard.allows_drafts, "most of what may be lost is lost"
