"""Regret: the default beside fixed plans, in simulation."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_redrafter.bench.lab import hard_siblings
from mlx_redrafter.bench.lab.hard_machines import CASES, times_by_plain
from mlx_redrafter.bench.lab.hard_siblings import MisleadingText
from mlx_redrafter.bench.lab.regret import begin_policy, simulate_regret
from mlx_redrafter.bench.lab.scenarios import LEVELS, Scenario, make_scenario
from mlx_redrafter.bench.lab.simulation import (
    FIXED,
    SimulatedText,
    SimulatedTree,
    play,
    run_fixed,
    run_policy,
)
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.plans import FixedPolicy


def test_the_regret_of_simulated_texts_is_small_and_reproducible(tmp_path, run_lab):
    """One scenario of every kind of machine; the command has hundreds."""
    out = tmp_path / "s.json"
    assert "median" in run_lab("simulate", "--scenarios", 6, "-o", out)
    found = SimpleNamespace(**json.loads(out.read_text())["found"])
    assert found.median <= 0.03
    assert found.median <= found.p95 <= 0.08
    assert found.p95 <= found.worst <= 0.15
    assert found.least_plain >= 0.98
    without, stored = np.median(found.first_texts, axis=0)
    assert stored >= max(0.95, without)
    assert simulate_regret(1).outcomes[0].speed == found.outcomes[0][1]


class Fixed(FixedPolicy):
    waits = False


def test_a_fixed_policy_takes_the_time_that_is_computed_for_it():
    text = SimulatedText(make_scenario(0))
    for plan in FIXED[::14]:
        decoded = run_policy(text, Fixed(plan), 0, 200)
        assert decoded == pytest.approx(run_fixed(text, plan, 0, 200), rel=0.05)
    plain = run_policy(text, Fixed(None), 0, 200)
    assert plain == pytest.approx(200 * text.scenario.costs.plain, rel=0.06)


def test_a_policy_is_told_no_more_than_decoding_knows():
    """Drafts beyond those accepted have tokens that say nothing of the text."""
    text = SimulatedText(make_scenario(3))
    drafts = text.drafts(10, 4)
    right = {token for token in drafts.tokens if token > 0}
    assert right == set(range(11, 11 + len(right)))
    assert len(set(drafts.tokens)) == len(drafts.tokens)
    assert drafts.scores == sorted(drafts.scores, reverse=True)
    for draft, parent in enumerate(drafts.parents):
        above = 0 if parent == 0 else drafts.depths[parent - 1]
        assert drafts.depths[draft] == above + 1
    part = SimulatedTree(drafts).first(9).read()
    assert part.tokens == drafts.tokens[:8]


def test_probabilities_of_simulated_drafts_are_true_where_scores_are_not_scaled():
    accepted, expected = [], []
    for seed in range(0, 60):
        scenario = make_scenario(seed)
        if scenario.score_scale != 1.0:
            continue
        text = SimulatedText(scenario)
        for position in range(0, 200, 3):
            drafts = text.drafts(position, 1)
            accepted.append(drafts.tokens[0] > 0)
            expected.append(np.exp(drafts.scores[0]))
    assert len(accepted) > 300
    assert np.mean(accepted) == pytest.approx(np.mean(expected), abs=0.04)


def test_outcomes_are_relative_to_plain_decoding():
    scenario = make_scenario(1)
    outcome = play(scenario, lambda costs, before: Fixed(None))
    assert outcome.speed == pytest.approx(1.0, abs=0.03)
    assert outcome.best_speed >= 1.0
    always = play(scenario, lambda costs, before: Fixed(DraftPlan.of(1, 4, 4)))
    assert always.regret > 0


# Machines and drafters that are not what was timed or scored


@pytest.mark.parametrize("case", [case for case in CASES if case != "as timed"])
def test_no_machine_makes_drafting_much_slower_than_plain_decoding(case):
    for first, later in times_by_plain(5, case, begin_policy):
        assert first <= 1.15
        assert later <= 1.10


@pytest.mark.parametrize("case", hard_siblings.CASES)
def test_scores_of_siblings_that_mislead_cost_little(case):
    found = play(make_scenario(4), begin_policy, partial(MisleadingText, case=case))
    assert found.regret <= 0.12


def test_expectations_hold_on_a_drafter_that_knows_three_of_four_tokens():
    """Eight sequences in a row; the other siblings are noise, whatever their scores say."""
    costs = make_scenario(2).costs
    ease = np.full(8 * 96 + LEVELS + 2, 1.1)
    known = {"score_scale": 0.5, "fade": 0.0, "timed": costs, "seed": 5}
    scenario = Scenario(name="", ease=ease, costs=costs, **known)
    text = MisleadingText(scenario, "siblings never right")
    shapes = (1, 3, 3), (1, 4, 4), (1, 6, 6), (2, 6, 16), (3, 6, 16)
    fixed = [DraftPlan.of(*shape) for shape in shapes]
    policy, total, total_best = None, 0.0, 0.0
    for number in range(8):
        policy = begin_policy(costs, policy)
        start, stop = 96 * number, 96 * (number + 1)
        seconds = run_policy(text, policy, start, stop, seed=number)
        if number < 2:
            continue
        drafted = [one for one in policy.shapes() if one.plan is not None and one.steps]
        expected = sum(one.expected_tokens for one in drafted)
        assert sum(one.tokens for one in drafted) == pytest.approx(expected, rel=0.2)
        best = min(run_fixed(text, plan, start, stop) for plan in fixed)
        assert seconds <= 1.14 * best
        total, total_best = total + seconds, total_best + best
    assert total <= 1.06 * total_best
