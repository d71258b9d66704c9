"""Expected drafts of plans: means over trees, extrapolated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlx_redrafter.policy.calibration import MEMORY, Calibration, ExpectedDrafts, ScoredDrafts
from mlx_redrafter.policy.plans import COUNTS, LENGTHS, PLANS, SIZES, CurrentCosts, StepCosts
from mlx_redrafter.trees.tree import TokenTree

COSTS = StepCosts(
    1.0, {size: 1 + 0.02 * size for size in SIZES}, {1: 0.0, 2: 0.0}, {1: 0.01, 2: 0.011}, 0.02
)


def _scored(place: tuple[int, int], scores: list[float], parents: list[int]) -> ScoredDrafts:
    tree = TokenTree.of(range(len(parents) + 1), [0, *parents], scores)
    scored = ScoredDrafts(PLANS[place], tree)
    scored.score(Calibration())
    return scored


def _chain(length: int, probability: float = 0.5) -> ScoredDrafts:
    count = LENGTHS[length] - 1
    scores = [(i + 1) * math.log(probability) for i in range(count)]
    return _scored((0, length), scores, list(range(count)))


def _learn(expected: ExpectedDrafts, scored: ScoredDrafts, times: int = 1) -> None:
    for _ in range(times):
        expected.learn(scored, CurrentCosts(COSTS), 0.9)


def test_a_chain_shows_every_shorter_one() -> None:
    expected = ExpectedDrafts()
    _learn(expected, _chain(4))
    for n, length in enumerate(LENGTHS[:5]):
        for s, count in enumerate(COUNTS):
            drafts = min(length - 1, count)
            assert expected.mean[0, n, s] == pytest.approx(1 - 0.5**drafts, abs=1e-6)


def test_a_tree_shows_the_chain_within_and_both_orders() -> None:
    """Two children, whose better one has a child: depth 2."""
    chances = [0.5, 0.4, 0.3]
    scored = _scored((1, 1), np.log(chances).tolist(), [0, 0, 1])
    scored.probabilities = [0.3, 0.45, 0.25]
    expected = ExpectedDrafts()
    _learn(expected, scored)
    assert expected.mean[1, 1, :4] == pytest.approx([0.0, 0.3, 0.75, 1.0])
    assert expected.mean[0, 1, :4] == pytest.approx([0.0, 0.3, 0.55, 0.55])
    assert expected.chosen[0, 1, 0] == pytest.approx(0.75), "two of the first level pay"


@pytest.mark.parametrize("probability", [0.01, 0.5, 0.99])
def test_no_plan_is_expected_to_bring_more_than_its_drafts(probability: float) -> None:
    """However small the means that ratios extrapolate from."""
    expected = ExpectedDrafts()
    for place in (0, 6, 1, 5, 0):
        _learn(expected, _chain(place, probability), 3)
        _learn(expected, _chain(place, 1e-4))
        assert (expected.mean <= np.array(COUNTS) + 1e-9).all()
        assert (expected.mean >= 0).all()


def test_the_newest_trees_count() -> None:
    expected = ExpectedDrafts()
    _learn(expected, _chain(4, 0.9), 100)
    _learn(expected, _chain(4, 0.1), 3 * MEMORY)
    assert expected.mean[0, 0, 1] == pytest.approx(0.1, abs=0.05)
