"""Regret: the default beside fixed plans, on a pair and in simulation."""

import json

import numpy as np
import pytest

from mlx_redrafter.bench.lab.regret import GRID, find_regret, simulate_regret
from mlx_redrafter.bench.lab.scenarios import make_scenario
from mlx_redrafter.bench.lab.simulation import (
    FIXED,
    SimulatedText,
    SimulatedTree,
    play,
    run_fixed,
    run_policy,
)
from mlx_redrafter.bench.runs import AUTO, PLAIN, STOCK, TimedRun
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.plans import FixedPolicy
from tests.bench.commands import run_lab


def make_run(arm, repeat, seconds, tokens=11):
    steps = [] if arm == STOCK else [tokens - 1]
    ids = list(range(tokens))
    return TimedRun("", 0, arm, "p", "c", repeat, 5, 1.0, seconds, ids, steps, 80, 80, 0)


def test_the_best_fixed_way_is_the_one_with_the_highest_median():
    seconds = {STOCK: (4, 4, 4), PLAIN: (4, 4, 4), "a": (2, 2, 9), "b": (1, 3, 3), AUTO: (1, 2, 3)}
    runs = [
        make_run(arm, i, value) for arm, values in seconds.items() for i, value in enumerate(values)
    ]
    found = find_regret(runs, STOCK)
    assert found.best == "a"
    assert found.ratio.median == pytest.approx(2.0)
    assert found.ratio.count == 3
    assert len(found.rows) == 5


def test_plain_decoding_may_be_the_best():
    runs = [make_run(arm, 0, s) for arm, s in ((STOCK, 2), (PLAIN, 2), ("a", 4), (AUTO, 2.5))]
    found = find_regret(runs, STOCK)
    assert (found.best, found.ratio.median) == (PLAIN, pytest.approx(0.8))


def test_regret_of_a_pair(folders, tmp_path):
    target, drafter = folders
    prompts, out = tmp_path / "p.txt", tmp_path / "r.json"
    prompts.write_text("abc abc\n\ndef def")
    options = ("--model", target, "--drafter", drafter, "--prompts", prompts, "-o", out)
    text = run_lab("regret", *options, "-m", 12, "--repeats", 1)
    assert "auto / " in text
    result = json.loads(out.read_text())
    assert len(result["runs"]) == 2 * (len(GRID) + 3)
    assert not any(row["num_different"] for row in result["found"]["rows"])


def test_simulated_regret_is_reproducible(tmp_path):
    out = tmp_path / "s.json"
    text = run_lab("simulate", "--scenarios", 2, "-o", out)
    assert "median" in text
    found = simulate_regret(2)
    assert json.loads(out.read_text())["found"]["outcomes"][1][1] == found.outcomes[1].speed
    assert found.worst >= found.p95 >= found.median


class Fixed(FixedPolicy):
    waits = False


def test_a_fixed_policy_takes_the_time_that_is_computed_for_it():
    text = SimulatedText(make_scenario(0))
    for plan in FIXED[::7]:
        decoded = run_policy(text, Fixed(plan), 0, 200)
        assert decoded == pytest.approx(run_fixed(text, plan, 0, 200), rel=0.05)
    plain = run_policy(text, Fixed(None), 0, 200)
    assert plain == pytest.approx(200 * text.scenario.costs.plain, rel=0.06)


def test_a_shared_machine_slows_the_same_text_down() -> None:
    quiet, shared = make_scenario(5), make_scenario(5, is_shared=True)
    assert shared.ease.tolist() == quiet.ease.tolist()
    assert shared.timed == quiet.timed
    text, own = SimulatedText(shared), SimulatedText(quiet)
    assert text.drafts(10, 2) == own.drafts(10, 2)
    assert run_fixed(text, None, 0, 200) > 1.05 * run_fixed(own, None, 0, 200)
    late = shared.seconds(240, None, 1, waits=False) / shared.slowed[240]
    assert late > quiet.seconds(240, None, 1, waits=False)
    for plan in (None, DraftPlan.of(2, 4, 8)):
        decoded = run_policy(text, Fixed(plan), 0, 200)
        assert decoded == pytest.approx(run_fixed(text, plan, 0, 200), rel=0.1)


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
