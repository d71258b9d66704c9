"""What a proposer's probabilities are worth, learnt from which drafts were right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlx_redrafter.policy.calibration import WINDOW, Calibration, draft_features
from mlx_redrafter.policy.hindsight import Hindsight
from mlx_redrafter.trees.tree import Drafts


def _drafts(*chances: float) -> Drafts:
    """Children of the root with these probabilities."""
    count = len(chances)
    scores = np.log(chances).tolist()
    return Drafts(scores, [1] * count, [0] * count, list(range(10, 10 + count)))


def _learnt(stated: float, true: float, count: int = 300) -> Calibration:
    calibration = Calibration()
    features = draft_features(_drafts(stated))
    for i in range(count):
        calibration.add(features, [(0, int((i + 1) * true) > int(i * true))])
        calibration.fit()
    return calibration


def test_a_proposer_is_believed_until_something_is_known() -> None:
    chances = [0.9, 0.05, 0.01]
    found = Calibration().probabilities(draft_features(_drafts(*chances)))
    assert found == pytest.approx(chances, rel=1e-6)


@pytest.mark.parametrize(("stated", "true"), [(0.999, 0.5), (0.1, 0.8), (0.7, 0.7), (0.9, 0.0)])
def test_probabilities_become_what_is_seen(stated: float, true: float) -> None:
    calibration = _learnt(stated, true)
    (found,) = calibration.probabilities(draft_features(_drafts(stated)))
    assert found == pytest.approx(true, abs=0.07)


def test_ten_drafts_in_vain_are_enough_to_doubt() -> None:
    (found,) = _learnt(0.8, 0.0, 10).probabilities(draft_features(_drafts(0.8)))
    assert found < 0.3


def test_what_is_old_is_forgotten() -> None:
    calibration, features = Calibration(), draft_features(_drafts(0.6))
    for right in (1, 9):
        for i in range(WINDOW):
            calibration.add(features, [(0, i % 10 < right)])
            calibration.fit()
    assert calibration.probabilities(features)[0] == pytest.approx(0.9, abs=0.05)


def test_a_text_begins_with_the_weights_of_the_one_before_and_leaves_them_alone() -> None:
    before = _learnt(0.9, 0.2)
    features = draft_features(_drafts(0.9))
    known = before.probabilities(features)[0]
    after = Calibration(before)
    assert after.probabilities(features)[0] == known
    for _ in range(100):
        after.add(features, [(0, True)])
        after.fit()
    assert after.probabilities(features)[0] > known == before.probabilities(features)[0]


def test_extreme_scores_stay_finite() -> None:
    drafts = Drafts([0.0, -1e30, -1e30], [1, 1, 2], [0, 0, 1], [1, 2, 3])
    calibration = Calibration()
    calibration.add(draft_features(drafts), [(0, False), (1, True), (2, True)])
    calibration.fit()
    assert np.isfinite(calibration.probabilities(draft_features(drafts))).all()


def test_siblings_have_ranks_whatever_their_order_among_others() -> None:
    drafts = Drafts([-0.1, -0.2, -0.3, -2.0], [1, 2, 2, 1], [0, 1, 1, 0], [1, 2, 3, 4])
    assert [math.expm1(rank) for *_, rank in draft_features(drafts)] == pytest.approx([0, 0, 1, 1])


TREE = Drafts([-0.1, -0.2, -0.5, -0.6, -0.9], [1, 2, 1, 2, 3], [0, 1, 0, 1, 2], [5, 6, 7, 8, 9])


def test_hindsight_asks_of_children_of_right_nodes_only() -> None:
    hindsight = Hindsight(TREE)
    assert hindsight.follow([5]) == [(0, True), (2, False)]
    assert not hindsight.is_over
    assert hindsight.follow([8, 1]) == [(1, False), (3, True)]
    assert hindsight.is_over
    assert hindsight.follow([9]) == []


def test_hindsight_of_a_text_that_goes_another_way() -> None:
    hindsight = Hindsight(TREE)
    assert hindsight.follow([1, 6]) == [(0, False), (2, False)]
    assert hindsight.is_over
