"""Counts and the ratios derived from them."""

from __future__ import annotations

import pytest

from mlx_redrafter.decoding.delivery import DecodingStats, ShapeStats
from mlx_redrafter.draft_plan import DraftPlan, DraftShape


def test_before_the_first_step() -> None:
    stats = DecodingStats(num_tokens=1)
    assert (stats.steps, stats.tokens_per_step, stats.acceptance_rate_by_depth) == (0, None, [])


def test_worked_example() -> None:
    """Four steps that accept 2, 0, 2 and 1 drafts yield 3 + 1 + 3 + 2 tokens after the first."""
    stats = DecodingStats(num_tokens=10)
    for num_accepted in (2, 0, 2, 1):
        stats.count_step(num_accepted, num_verified=9, num_unmerged=17)
    assert stats.accepted_counts == [1, 1, 2]
    assert stats.steps == 4
    assert stats.tokens_per_step == pytest.approx(9 / 4)
    assert stats.acceptance_rate_by_depth == [0.75, 0.5]
    assert (stats.num_verified, stats.num_unmerged) == (36, 68)


def test_two_requests_do_not_share_counts() -> None:
    first, second = DecodingStats(), DecodingStats()
    first.count_step(1, 2, 2)
    assert second.accepted_counts == []


def test_a_kind_of_step_shows_what_was_found_and_expected() -> None:
    plan = DraftPlan(DraftShape(2, 6), 8)
    shown = str(ShapeStats(plan, 0.0061, 4, 10, 0.0052, 12.0))
    assert shown == "2x6:8, 4 steps: 2.50 (3.00) tokens, 6.1 (5.2) ms"
    assert str(ShapeStats(None, 0.004, 0, 0, 0.004, 0.0)).startswith("plain, 0 steps: 0.00 (0.00)")
