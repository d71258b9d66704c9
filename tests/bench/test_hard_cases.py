"""The default on simulated machines and drafters that are not what was timed or scored."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from mlx_redrafter.bench.lab import hard_siblings, step_model
from mlx_redrafter.bench.lab.hard_machines import CASES, times_by_plain
from mlx_redrafter.bench.lab.hard_siblings import MisleadingText
from mlx_redrafter.bench.lab.regret import begin_policy
from mlx_redrafter.bench.lab.scenarios import LEVELS, Scenario, make_scenario
from mlx_redrafter.bench.lab.simulation import play, run_fixed, run_policy
from mlx_redrafter.draft_plan import DraftPlan


@pytest.mark.parametrize("case", [case for case in CASES if case != "as timed"])
@pytest.mark.parametrize("number", [0, 5])
def test_no_machine_makes_drafting_much_slower_than_plain_decoding(case: str, number: int) -> None:
    for first, later in times_by_plain(number, case, begin_policy):
        assert first <= 1.15
        assert later <= 1.10


@pytest.mark.parametrize("case", hard_siblings.CASES)
def test_scores_of_siblings_that_mislead_cost_little(case: str) -> None:
    scenario = make_scenario(4)
    found = play(scenario, begin_policy, partial(MisleadingText, case=case))
    assert found.regret <= 0.12


def test_expectations_hold_on_a_drafter_that_knows_three_of_four_tokens() -> None:
    """Eight sequences in a row; the other siblings are noise, whatever their scores say."""
    costs = make_scenario(2).costs
    ease = np.full(8 * 96 + LEVELS + 2, 1.1)
    known = {"score_scale": 0.5, "fade": 0.0, "timed": costs, "seed": 5}
    text = MisleadingText(
        Scenario(name="", ease=ease, costs=costs, **known), "siblings never right"
    )
    fixed = [
        DraftPlan.of(width, length, size)
        for width, length, size in ((1, 3, 3), (1, 4, 4), (1, 6, 6), (2, 6, 16), (3, 6, 16))
    ]
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


def test_every_way_to_run_a_step_on_a_gpu_makes_it_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a chain by each way; no text slows the default with all of them down."""
    monkeypatch.setattr(step_model, "ROWS", 1)
    chain = step_model.fixed(step_model.PLANS["chain of 4"])
    known = [step_model.Ways(*[True] * count) for count in range(5)]
    found = [step_model.find_speeds("26 November", 0, ways, [chain])[0][0] for ways in known]
    assert found == sorted(found)
    assert found[0] < 0.5
    runs = [step_model.default()]
    (default, least), *_ = step_model.find_speeds("26 November", 0, known[-1], runs)
    assert default > 1.8
    assert least > 0.97


def test_apples_code_has_the_chain_of_ours_and_pays_for_every_length() -> None:
    """Compare chains: a chain is one beam, so both accept the same drafts of it."""
    plan, ways = step_model.PLANS["chain of 4"], step_model.Ways(True, True, True, True)
    text = step_model.SimulatedText(step_model.make_text("26 November", 0, ways, seed=0))
    ours = step_model.fixed(plan)(text, 0, 100)
    costs = text.scenario.costs
    step = costs.verify[plan.num_nodes] + costs.drafting(plan.shape)
    host = step_model.APPLES_BUILD * step_model.BUILD + step_model.READ_AND_START
    for has_graphs, extra in ((False, host), (True, host + step_model.FIRST_USE)):
        theirs = step_model.apples(plan, has_graphs)(text, 0, 100)
        assert theirs / ours == pytest.approx((step + extra / 1e3) / step)
