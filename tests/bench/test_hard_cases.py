"""The default on simulated machines and drafters that are not what was timed or scored."""

from functools import partial

import numpy as np
import pytest

from mlx_redrafter.bench.lab import hard_siblings
from mlx_redrafter.bench.lab.hard_machines import CASES, times_by_plain
from mlx_redrafter.bench.lab.hard_siblings import MisleadingText
from mlx_redrafter.bench.lab.regret import begin_policy
from mlx_redrafter.bench.lab.scenarios import LEVELS, Scenario, make_scenario
from mlx_redrafter.bench.lab.simulation import play, run_fixed, run_policy
from mlx_redrafter.draft_plan import DraftPlan


@pytest.mark.parametrize("case", [case for case in CASES if case != "as timed"])
@pytest.mark.parametrize("number", [5])
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
