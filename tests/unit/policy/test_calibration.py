"""Probabilities of drafts: what the proposer says, corrected by which drafts were right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlx_redrafter.policy.calibration import WINDOW, Calibration, ScoredDrafts, features_of
from mlx_redrafter.policy.plans import PLANS
from mlx_redrafter.trees.tree import Drafts, TokenTree


def _random_drafts(rng: np.random.Generator) -> Drafts:
    """A tree of 40 drafts in the proposer's order, three levels deep."""
    scores, depths, parents = [], [], []
    nodes = [(0.0, 0)]
    left = [1.0]
    for _ in range(40):
        parent = int(rng.integers(len(nodes)))
        score, depth = nodes[parent]
        if depth == 3:
            continue
        q = left[parent] * rng.uniform(0.0, 0.9)
        left[parent] -= q
        nodes.append((score + math.log(max(q, 1e-30)), depth + 1))
        left.append(1.0)
        scores.append(nodes[-1][0])
        depths.append(depth + 1)
        parents.append(parent)
    return Drafts(scores, depths, parents, list(range(len(scores))))


def _siblings(*chances: float) -> Drafts:
    """Children of the root with these probabilities."""
    count = len(chances)
    return Drafts(np.log(chances).tolist(), [1] * count, [0] * count, list(range(10, 10 + count)))


def _learn(stated: float, true: float, count: int = 300) -> Calibration:
    calibration, features = Calibration(), features_of(_siblings(stated))
    for i in range(count):
        calibration.learn(features, [(0, int((i + 1) * true) > int(i * true))])
        calibration.fit()
    return calibration


def test_siblings_never_add_up_to_more_than_1_nor_rise_whatever_the_weights() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        calibration = Calibration()
        calibration.weights = rng.normal(0.0, 4.0, 6)
        drafts = _random_drafts(rng)
        found = calibration.probabilities(features_of(drafts), drafts.parents)
        reached = [1.0, *found]
        children: dict[int, list[float]] = {}
        for probability, parent in zip(found, drafts.parents, strict=True):
            children.setdefault(parent, []).append(probability)
        for parent, siblings in children.items():
            assert sum(siblings) <= reached[parent] + 1e-9
            assert siblings == sorted(siblings, reverse=True)


def test_the_proposer_is_believed_until_something_is_known() -> None:
    chances = [0.9, 0.05, 0.01]
    found = Calibration().probabilities(features_of(_siblings(*chances)), [0] * 3)
    assert found == pytest.approx(chances, rel=1e-6)


@pytest.mark.parametrize(("stated", "true"), [(0.999, 0.5), (0.1, 0.8), (0.7, 0.7), (0.9, 0.0)])
def test_probabilities_become_what_is_seen(stated: float, true: float) -> None:
    (found,) = _learn(stated, true).probabilities(features_of(_siblings(stated)), [0])
    assert found == pytest.approx(true, abs=0.07)


def test_ten_wrong_drafts_are_enough_to_doubt() -> None:
    (found,) = _learn(0.8, 0.0, 10).probabilities(features_of(_siblings(0.8)), [0])
    assert found < 0.3


def test_frequencies_are_found_even_if_all_log_odds_are_14() -> None:
    rng, calibration = np.random.default_rng(1), Calibration()
    rates = {0.0: 0.2, 1.0: 0.3, 2.0: 0.35}
    for i in range(1000):
        place = float(rng.integers(3))
        calibration.learn([(False, 14.0, place)], [(0, bool(rng.random() < rates[place]))])
        if i % 8 == 0:
            calibration.fit()
    for place, rate in rates.items():
        (found,) = calibration.probabilities([(False, 14.0, place)], [0])
        assert found == pytest.approx(rate, abs=0.05)


def test_later_siblings_have_weights_of_their_own() -> None:
    """The first child is right as often as it says, later ones never."""
    calibration, rng = Calibration(), np.random.default_rng(2)
    drafts = _siblings(0.6, 0.2, 0.1, 0.05)
    features = features_of(drafts)
    for _ in range(400):
        is_right = bool(rng.random() < 0.6)
        found = [(0, True)] if is_right else [(i, False) for i in range(4)]
        calibration.learn(features, found)
        calibration.fit()
    first, *later = calibration.probabilities(features, drafts.parents)
    assert first == pytest.approx(0.6, abs=0.1), "some 115 steps count"
    assert max(later) < 0.03


def test_old_observations_are_forgotten() -> None:
    calibration, features = Calibration(), features_of(_siblings(0.6))
    for right in (1, 9):
        for i in range(WINDOW):
            calibration.learn(features, [(0, i % 10 < right)])
            calibration.fit()
    assert calibration.probabilities(features, [0])[0] == pytest.approx(0.9, abs=0.05)


def test_extreme_scores_stay_finite() -> None:
    drafts = Drafts([0.0, -1e30, -1e30], [1, 1, 2], [0, 0, 1], [1, 2, 3])
    features, calibration = features_of(drafts), Calibration()
    calibration.learn(features, [(0, False), (1, True), (2, True)])
    calibration.fit()
    assert np.isfinite(calibration.probabilities(features, drafts.parents)).all()


def test_siblings_are_told_apart_by_rank_and_first_children_by_depth() -> None:
    drafts = Drafts([-0.1, -0.2, -0.3, -2.0], [1, 2, 2, 1], [0, 1, 1, 0], [1, 2, 3, 4])
    found = [(is_later, place) for is_later, _, place in features_of(drafts)]
    assert found == [(False, 0.0), (False, 1.0), (True, 0.0), (True, 0.0)]


def test_every_sibling_up_to_the_right_one_is_observed() -> None:
    """Two steps: the second sibling is right, then the text leaves the tree."""
    tree = TokenTree.of([0, 5, 6, 7, 8], [0, 0, 0, 0, 2], [-0.5, -1.5, -2.0, -2.5])
    scored, calibration = ScoredDrafts(PLANS[1, 1], tree), Calibration()
    scored.score(calibration)
    for token, node, count in ((6, 2, 2), (9, None, 3)):
        scored.extend([token])
        scored.follow(calibration)
        assert scored._node == node
        assert calibration._count == count
