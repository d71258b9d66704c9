"""What drafting has been worth: means that follow, and how far probabilities are trusted."""

from __future__ import annotations

import pytest

from mlx_redrafter.policy.acceptance import (
    CARRIED_OVER,
    MAX_RATIO,
    MEMORY,
    PRIOR_NODES,
    PRIOR_SHARE,
    AcceptanceStats,
)

LEVELS, NODES = 4, 8
LONGEST = LEVELS + 1
SECONDS = {2: 0.6, PRIOR_NODES: 0.8, NODES: 1.0}


def _learnt(steps: int, accepted: int, *expected: float, nodes: int = NODES) -> AcceptanceStats:
    acceptance = AcceptanceStats(LEVELS)
    for _ in range(steps):
        acceptance.learn(nodes, accepted, expected)
    return acceptance


def test_what_is_expected_becomes_what_was_seen() -> None:
    acceptance = _learnt(4 * MEMORY, 2, 0.9, 0.6, 0.3, 0.2)
    for length, drafts in ((2, 0.9), (3, 1.5), (LONGEST, 2.0)):
        assert acceptance.speed(length, SECONDS) == pytest.approx((1 + drafts) / 1.0, rel=0.05)


@pytest.mark.parametrize(
    ("expected", "others"),
    [((0.8, 0.4), (0.2, 0.1)), ((0.8, 0.4, 0.1), (0.025,)), ((0.4, 0.8), (0.8, 0.8))],
)
def test_levels_that_were_not_drafted_follow_those_that_were(
    expected: tuple[float, ...], others: tuple[float, ...]
) -> None:
    total = sum(expected) + sum(others)
    acceptance = _learnt(16 * MEMORY, 1, *expected)
    ratio = acceptance.calibration_ratio
    assert acceptance.speed(LONGEST, SECONDS) == pytest.approx(1 + ratio * total, rel=1e-3)


def test_drafts_without_any_chance_are_no_error() -> None:
    acceptance = _learnt(100 * MEMORY, 0, 0.0, 0.0)
    assert acceptance.speed(LONGEST, SECONDS) == pytest.approx(1.0, rel=1e-3)


def test_the_first_step_counts_as_much_as_the_guess() -> None:
    acceptance = _learnt(1, 2, 1.0, 1.0)
    assert acceptance.calibration_ratio == 1
    drafts = (PRIOR_SHARE + 1) / 2 + (PRIOR_SHARE**2 + 1) / 2
    took = (SECONDS[PRIOR_NODES] + SECONDS[NODES]) / 2
    assert acceptance.speed(3, SECONDS) == pytest.approx((1 + drafts) / took)


def test_speeds_are_of_what_steps_take_now() -> None:
    acceptance = _learnt(4 * MEMORY, 2, 0.9, 0.6)
    speed = acceptance.speed(3, SECONDS)
    assert acceptance.speed(3, SECONDS | {NODES: 2.0}) == pytest.approx(speed / 2, rel=0.02)


@pytest.mark.parametrize(
    ("accepted", "ratio"), [(2, 1.0), (1, 0.5), (0, 0.0), (4, 2.0), (9, MAX_RATIO)]
)
def test_probabilities_are_trusted_as_far_as_they_come_true(accepted: int, ratio: float) -> None:
    assert AcceptanceStats(LEVELS).calibration_ratio == 1
    assert _learnt(4 * MEMORY, accepted, 1.2, 0.8).calibration_ratio == pytest.approx(
        ratio, abs=0.02
    )


def test_another_text_begins_with_what_this_one_taught_and_changes_its_mind_sooner() -> None:
    before = _learnt(4 * MEMORY, 2, 1.2, 0.8)
    known = before.speed(3, SECONDS), before.calibration_ratio
    after = AcceptanceStats(LEVELS, before)
    assert (after.speed(3, SECONDS), after.calibration_ratio) == pytest.approx(known)
    after.learn(2, 0, (1.2, 0.8))
    assert after.calibration_ratio < 0.7
    share = 1 / (CARRIED_OVER + 1)
    assert after.speed(3, SECONDS) == pytest.approx(
        (1 + 2 * after.calibration_ratio) / (share * SECONDS[2] + (1 - share) * SECONDS[NODES]),
        rel=0.02,
    )
    assert (before.speed(3, SECONDS), before.calibration_ratio) == known, (
        "and leaves the other as it was"
    )
