"""What every plan would have got, from the drafts of one step."""

from __future__ import annotations

from itertools import accumulate

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_redrafter.policy.candidates import (
    FITS,
    LENGTHS,
    LONGEST,
    PLACES,
    PLANS,
    SHAPES,
    SIZES,
    WIDTHS,
    expected_drafts,
)
from mlx_redrafter.policy.gains import MEMORY, Extrapolation, Gains
from mlx_redrafter.proposers.expansion import best_nodes
from mlx_redrafter.proposers.redrafter.beam import expand
from mlx_redrafter.trees.tree import Drafts
from tests.helpers.models import random_drafter

ROWS, HIDDEN = 64, 32


def _search(width: int, length: int, seed: int) -> Drafts:
    """All drafts of a search by a random drafter."""
    drafter = random_drafter(ROWS, HIDDEN, seed=seed)
    embed = mx.random.normal((ROWS, HIDDEN), key=mx.random.key(seed))
    project = drafter.input_of(lambda tokens: embed[tokens])
    plan = PLANS[WIDTHS.index(width), LENGTHS.index(length)]
    expansion = expand(drafter, project, embed[9], mx.array([9]), plan.shape)
    return best_nodes(expansion, mx.array([9]), plan).read()


@given(st.integers(0, 50), st.sampled_from(list(SHAPES.values())))
@settings(max_examples=25, deadline=None)
def test_a_wide_search_shows_what_narrower_and_shorter_ones_find(seed: int, shape: object) -> None:
    wide = _search(WIDTHS[-1], LENGTHS[-1], seed)
    found, chosen = expected_drafts(wide, np.exp(wide.scores).tolist(), LONGEST.shape)
    w, length = PLACES[shape]  # type: ignore[index]
    own = _search(WIDTHS[w], LENGTHS[length], seed)
    sums = [0.0, *accumulate(np.exp(own.scores).tolist())]
    for i, size in enumerate(SIZES):
        if FITS[w, length, i]:
            assert found[w, length, i] == pytest.approx(sums[size - 1], rel=0.02)
            assert chosen[w, length, i] == pytest.approx(sums[size - 1], rel=0.02)


def test_drafts_chosen_by_their_chances_are_worth_more() -> None:
    drafts = Drafts([-0.1, -0.2, -0.3, -1.0], [1, 2, 3, 1], [0, 1, 2, 0], [1, 2, 3, 4])
    found, chosen = expected_drafts(drafts, [0.5, 0.2, 0.1, 0.4], SHAPES[1, 2])
    assert found[1, 2, :3].tolist() == pytest.approx([0.5, 0.7, 0.8])
    assert chosen[1, 2, :3].tolist() == pytest.approx([0.5, 0.9, 1.1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_a_chain_gets_the_chances_of_its_first_drafts(shares: list[float]) -> None:
    count = len(shares)
    chances = np.cumprod(shares)
    drafts = Drafts([0.0] * count, list(range(1, count + 1)), list(range(count)), [7] * count)
    found, chosen = expected_drafts(drafts, chances, SHAPES[0, count - 1])
    sums = [0.0, *accumulate(chances.tolist())]
    for length in range(count):
        wanted = [sums[min(length + 1, size - 1)] for size in SIZES]
        assert found[0, length].tolist() == chosen[0, length].tolist() == pytest.approx(wanted)


# Of steps that verify none of the drafts, or so many.
SECONDS = np.ones((*FITS.shape[:2], 1 + len(SIZES)))


def _learn(gains: Gains, found: np.ndarray, times: int = 1) -> None:
    for _ in range(times):
        gains.learn(found, found, SECONDS, SECONDS[..., 1], 1.0)


def test_the_first_draft_outweighs_all_hope() -> None:
    gains = Gains()
    assert gains.mean.min() > 0.5
    _learn(gains, np.zeros(FITS.shape))
    assert gains.mean.max() == 0


def test_plans_beyond_a_search_are_extrapolated_by_what_longer_and_wider_ones_gave() -> None:
    gains, rising = Gains(), np.ones(FITS.shape)
    rising *= np.linspace(1, 2, len(LENGTHS))[:, None] * np.linspace(1, 1.3, 4)[:, None, None]
    _learn(gains, rising, 40)
    _learn(gains, 0.5 * rising[:2, :3], 40)
    assert gains.mean == pytest.approx(0.5 * rising, rel=0.2)


def test_the_text_before_counts_for_a_few_drafts() -> None:
    before, zero = Gains(), np.zeros(FITS.shape)
    _learn(before, zero + 3, MEMORY)
    after = Gains(before)
    assert after.mean.min() == pytest.approx(3.0)
    _learn(after, zero, MEMORY)
    assert after.mean.max() < 1.0
    assert before.mean.min() == pytest.approx(3.0)


def test_a_text_begins_with_what_those_before_got_and_not_with_how_the_last_one_ended() -> None:
    gains, zero = Gains(), np.zeros(FITS.shape)
    for value in (2.0, 1.0):
        _learn(gains, zero + value, 2 * MEMORY)
        gains = Gains(gains)
    assert gains.mean == pytest.approx(zero + 1.5, rel=0.1)
    _learn(gains, zero, 1)
    assert Gains(gains).mean.min() > 1.4, "a draft alone changes little"
    for _ in range(9):
        gains = Gains(gains)
        _learn(gains, zero, 2 * MEMORY)
    assert Gains(gains).mean.max() < 0.1, "those long ago are forgotten"


def test_an_extrapolation_that_goes_on_leaves_the_one_before_as_it_was() -> None:
    first, found = Extrapolation(), np.ones((1, 3, len(SIZES)))
    wanted = first.extend(found, found)
    Extrapolation(first).extend(*[np.full((4, 5, len(SIZES)), 7.0)] * 2)
    assert np.array_equal(first.extend(found, found), wanted)


def test_steps_that_verify_what_is_worth_it_take_less_where_nothing_is() -> None:
    gains, found = Gains(), np.zeros(FITS.shape)
    seconds = 3 * SECONDS
    seconds[..., 0] = 1.0
    gains.learn(found, found, seconds, seconds[..., 1], 1.0)
    assert gains.chosen[0].max() == 0
    assert gains.chosen[1].max() == pytest.approx(1 / 3), "of a step that verifies some"
    gains.learn(found + 9, found + 9, seconds, seconds[..., 1], 1.0)
    assert gains.chosen[0].max() == pytest.approx(4.5)
    assert gains.chosen[1].max() == pytest.approx(2 / 3)
