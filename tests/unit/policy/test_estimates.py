"""What a policy knows: probabilities of drafts, expected drafts of plans, costs, and the guard."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mlx_redrafter.bench.lab.scenarios import make_scenario
from mlx_redrafter.bench.lab.simulation import SimulatedText
from mlx_redrafter.policy import plans
from mlx_redrafter.policy.calibration import (
    WINDOW,
    Calibration,
    ExpectedDrafts,
    ScoredDrafts,
    features_of,
)
from mlx_redrafter.policy.plans import LENGTHS, PLANS, SIZES, TRUST, Guard, StepCosts, TimeRatios
from mlx_redrafter.policy.state import PolicyState
from mlx_redrafter.trees.tree import Drafts, TokenTree


def _siblings(*chances: float) -> Drafts:
    """Children of the root with these probabilities."""
    count = len(chances)
    return Drafts(np.log(chances).tolist(), [1] * count, [0] * count, list(range(10, 10 + count)))


def _learnt(stated: float, true: float, count: int = 300) -> Calibration:
    calibration, features = Calibration(), features_of(_siblings(stated))
    for i in range(count):
        calibration.learn(features, [(0, int((i + 1) * true) > int(i * true))])
        calibration.fit()
    return calibration


def test_siblings_never_add_up_to_more_than_1_nor_rise_whatever_the_weights():
    rng, text = np.random.default_rng(0), SimulatedText(make_scenario(0))
    for position in range(200):
        calibration = Calibration()
        calibration.weights = rng.normal(0.0, 4.0, 6)
        drafts = text.drafts(position, 4)
        found = calibration.probabilities(features_of(drafts), drafts.parents)
        reached = [1.0, *found]
        children: dict[int, list[float]] = {}
        for probability, parent in zip(found, drafts.parents, strict=True):
            children.setdefault(parent, []).append(probability)
        for parent, siblings in children.items():
            assert sum(siblings) <= reached[parent] + 1e-9
            assert siblings == sorted(siblings, reverse=True)


@pytest.mark.parametrize(("stated", "true"), [(0.999, 0.5), (0.1, 0.8), (0.7, 0.7), (0.9, 0.0)])
def test_probabilities_become_what_is_seen(stated, true):
    (found,) = _learnt(stated, true).probabilities(features_of(_siblings(stated)), [0])
    assert found == pytest.approx(true, abs=0.07)
    (found,) = _learnt(0.8, 0.0, 10).probabilities(features_of(_siblings(0.8)), [0])
    assert found < 0.3, "ten wrong drafts are enough to doubt"


def test_frequencies_are_found_even_if_all_log_odds_are_14():
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


def test_later_siblings_have_weights_of_their_own():
    """The first child is right as often as it says, later ones never."""
    calibration, rng = Calibration(), np.random.default_rng(2)
    drafts = _siblings(0.6, 0.2, 0.1, 0.05)
    features = features_of(drafts)
    believed = calibration.probabilities(features, drafts.parents)
    assert believed == pytest.approx([0.6, 0.2, 0.1, 0.05], rel=1e-6), "until something is known"
    for _ in range(400):
        is_right = bool(rng.random() < 0.6)
        found = [(0, True)] if is_right else [(i, False) for i in range(4)]
        calibration.learn(features, found)
        calibration.fit()
    first, *later = calibration.probabilities(features, drafts.parents)
    assert first == pytest.approx(0.6, abs=0.1), "some 115 steps count"
    assert max(later) < 0.03


def test_old_observations_are_forgotten():
    calibration, features = Calibration(), features_of(_siblings(0.6))
    for right in (1, 9):
        for i in range(WINDOW):
            calibration.learn(features, [(0, i % 10 < right)])
            calibration.fit()
    assert calibration.probabilities(features, [0])[0] == pytest.approx(0.9, abs=0.05)


def test_extreme_scores_stay_finite():
    drafts = Drafts([0.0, -1e30, -1e30], [1, 1, 2], [0, 0, 1], [1, 2, 3])
    features, calibration = features_of(drafts), Calibration()
    calibration.learn(features, [(0, False), (1, True), (2, True)])
    calibration.fit()
    assert np.isfinite(calibration.probabilities(features, drafts.parents)).all()


COSTS = StepCosts(
    1.0, {size: 1 + 0.1 * size for size in SIZES}, {1: 0.0, 2: 0.0}, {1: 0.1, 2: 0.2}, wait=0.1
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


def _learn_drafts(expected: ExpectedDrafts, scored: ScoredDrafts, times: int = 1) -> None:
    for _ in range(times):
        expected.learn(scored, plans.CurrentCosts(COSTS), 0.9)


def test_drafts_of_two_sources_are_merged():
    """Drafts 1 and 2, of which 1 goes on with 3; the others have 1, 2 and a child of each."""
    chances = [0.5, 0.4, 0.3]
    log_probs = np.log(chances).tolist()
    tree = TokenTree.of(range(4), [0, 0, 0, 1], log_probs)
    others = Drafts(np.log([0.7, 0.6, 0.2, 0.1]).tolist(), [1, 2, 1, 2], [0, 1, 0, 3], [2, 7, 1, 3])
    for found in (None, Drafts([], [], [], []), others):
        find = None if found is None else partial(Drafts, *found)
        scored = ScoredDrafts(PLANS[1, 1], replace(tree, find_others=find))
        own = scored.score(Calibration())
        among, merged = scored.with_others()
        if found is not others:
            assert (among, merged) == (None, own)
    assert among.tokens == [1, 2, 3, 7]
    assert among.parents == [0, 0, 1, 2]
    assert among.depths == [1, 1, 2, 2]
    assert merged == pytest.approx([own[0], 0.7, own[2], 0.6])
    assert scored.drafts.tokens == [1, 2, 3], "what is learned from"


def test_a_chain_shows_every_shorter_one():
    expected = ExpectedDrafts()
    _learn_drafts(expected, _chain(4))
    for n, length in enumerate(LENGTHS[:5]):
        for s, count in enumerate(plans.COUNTS):
            drafts = min(length - 1, count)
            assert expected.mean[0, n, s] == pytest.approx(1 - 0.5**drafts, abs=1e-6)


def test_a_tree_shows_the_chain_within_and_both_orders():
    """Two children, whose better one has a child: depth 2."""
    chances = [0.5, 0.4, 0.3]
    scored = _scored((1, 1), np.log(chances).tolist(), [0, 0, 1])
    scored.probabilities = [0.3, 0.45, 0.25]
    expected = ExpectedDrafts()
    _learn_drafts(expected, scored)
    assert expected.mean[1, 1, :4] == pytest.approx([0.0, 0.3, 0.75, 1.0])
    assert expected.mean[0, 1, :4] == pytest.approx([0.0, 0.3, 0.55, 0.55])
    assert expected.chosen[0, 1, 0] == pytest.approx(0.75), "two of the first level pay"


@pytest.mark.parametrize("probability", [0.01, 0.5, 0.99])
def test_no_plan_is_expected_to_bring_more_than_its_drafts(probability):
    """However small the means that ratios extrapolate from."""
    expected = ExpectedDrafts()
    for place in (0, 6, 1, 5, 0):
        _learn_drafts(expected, _chain(place, probability), 3)
        _learn_drafts(expected, _chain(place, 1e-4))
        assert (expected.mean <= np.array(plans.COUNTS) + 1e-9).all()
        assert (expected.mean >= 0).all()


def _learn(ratios: TimeRatios, kind: int, ratio: float, times: int = 1) -> None:
    for _ in range(times):
        ratios.learn(kind, ratio)


def test_a_size_that_costs_more_than_timed_is_found_out():
    ratios = TimeRatios()
    for _ in range(20):
        ratios.learn(8, 3.0)
        ratios.learn(1, 1.0)
    known = ratios.of(8)
    ratios.learn(8, 60.0)
    assert ratios.of(8) == pytest.approx(known, rel=0.02), "one slow step changes nothing"
    assert ratios.of(8) == pytest.approx(3.0, rel=0.15)
    assert ratios.of(1) == pytest.approx(1.0, rel=0.1)
    assert ratios.of(4) < 1.5, "never used"
    for _ in range(10):  # something slows all steps, those that are not in use as well
        ratios.learn(8, 4.8)
        ratios.learn(1, 1.6)
    assert ratios.of(4) > 1.35
    first = TimeRatios()
    first.learn(1, 0.5)
    assert first.of(1) < 0.75, "other work makes a step slower, never faster"


def test_the_first_steps_correct_all_costs_that_are_estimates():
    timed, estimated = TimeRatios(), TimeRatios(plans.ESTIMATED)
    for ratios in (timed, estimated):
        _learn(ratios, 1, 2.0, times=4)
    assert timed.of(8) < 1.5
    assert 1.7 < estimated.of(8) < 2.1


def test_the_next_sequence_keeps_own_ratios_and_half_of_the_common_one():
    ratios = TimeRatios()
    for _ in range(20):
        ratios.learn(8, 3.0)
        ratios.learn(1, 1.5)
    own, before = ratios.of(8) / ratios.of(1), ratios.of(4)
    ratios.fade()
    assert ratios.of(8) / ratios.of(1) == pytest.approx(own)
    assert ratios.of(4) == pytest.approx(before**0.5)


def test_ratios_are_copied_while_another_thread_learns():
    state = PolicyState()

    class Meanwhile(float):
        def __deepcopy__(self, memo: object) -> "Meanwhile":
            state.ratios.learn(2, 1.1)
            return self

    state.ratios._own[1] = Meanwhile(0.0), 0.5
    assert 1 in state.for_next().ratios._own


def test_current_costs_are_timed_ones_times_ratios():
    costs, ratios = plans.CurrentCosts(COSTS), TimeRatios()
    w, n = plans.PLACES[PLANS[0, 2].shape]
    assert costs.step[w, n, 3] == pytest.approx(COSTS.drafting(PLANS[0, 2].shape) + COSTS.verify[4])
    assert costs.waiting[w, n, 3] == pytest.approx(costs.step[w, n, 3] + 0.1)
    assert costs.timed(PLANS[0, 2], 4, waits=True) == pytest.approx(costs.waiting[w, n, 3])
    assert costs.step[0, 0, 2] > 1e6, "a chain of two tokens has one draft"
    for kind in (1, plans.SHADOW, *SIZES):
        _learn(ratios, kind, 2.0, 60)
    before = costs.step[w, n, 3]
    costs.update(ratios)
    assert costs.step[w, n, 3] == pytest.approx(2 * before, rel=0.1)
    _learn(ratios, 4, 0.2, 40)
    costs.update(ratios)
    assert min(costs.verify) >= costs.plain
    # Plans longer than the proposer drafts are not offered.
    costs = plans.CurrentCosts(COSTS, max_length=4)
    assert costs.offered.any(axis=0).tolist() == [length <= 4 for length in LENGTHS]
    assert not plans.CurrentCosts(StepCosts(1.0, COSTS.verify)).offered.any(), "no network"


def _measured() -> Guard:
    guard = Guard(1.0)
    for _ in range(2):
        guard.learn_plain(1.0)
    return guard


def test_the_guard_stops_drafts_that_cost_more_than_they_yield():
    guard, lost = _measured(), 0.0
    for _ in range(250):
        if guard.allows_drafts:
            guard.learn_drafted(10.0, 1)
            lost += 9
        else:
            guard.learn_plain(1.0)
        guard.count(1)
    assert 9 <= lost <= TRUST + 9 + plans.LOSS * 250


def test_gains_pay_for_losses_up_to_a_bound_and_half_stays_for_the_next_sequence():
    guard, lost = _measured(), 0
    guard.learn_drafted(12.0, 1)
    assert not guard.allows_drafts
    guard.fade()
    guard.learn_drafted(6.0, 1)
    assert not guard.allows_drafts
    for _ in range(10):
        guard.learn_drafted(1.0, 4)
    while guard.allows_drafts:
        guard.learn_drafted(2.0, 1)
        lost += 1
    assert plans.SPARE + TRUST < lost <= plans.SPARE + TRUST + 1
    for _ in range(1000):  # plain steps make up for losses, and save nothing
        guard.count(1)
    guard.learn_drafted(TRUST + 2, 1)
    assert not guard.allows_drafts


def test_the_guard_goes_by_measured_plain_steps_and_is_careful_before():
    guard = Guard(2.0)
    assert guard.plain == 1.0
    guard.learn_plain(9.0)
    assert guard.plain == 1.0, "one plain step alone may have been disturbed"
    for _ in range(2):
        guard.learn_plain(1.5)
    assert guard.plain == 1.5
    guard.fade()
    assert guard.plain == 1.5
