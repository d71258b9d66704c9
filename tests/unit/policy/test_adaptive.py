"""The choice of a plan in simulated sequences, and how it changes."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlx_redrafter.bench.lab.regret import simulate_regret
from mlx_redrafter.bench.lab.scenarios import CURVES, LEVELS, QUIET, Scenario
from mlx_redrafter.bench.lab.simulation import SimulatedText, run_fixed, run_policy
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.adaptive import SWITCH, AdaptivePolicy
from mlx_redrafter.policy.plans import (
    COUNTS,
    EMPTY,
    LONGEST,
    LOOKUP,
    PLANS,
    SHORTEST,
    SIZES,
    Choice,
    FixedPolicy,
    StepCosts,
)
from mlx_redrafter.policy.state import PolicyState
from mlx_redrafter.trees.tree import Drafts, TokenTree

TOKENS = 200


def _costs(curve: str = "gentle", level: float = 0.01, wait: float = 0.02) -> StepCosts:
    widths = {1: 1.0, 2: 1.1, 4: 1.3}
    return StepCosts(
        plain=1.0,
        verify={size: CURVES[curve](size) for size in SIZES},
        first=dict.fromkeys(widths, 0.0),
        level={width: level * factor for width, factor in widths.items()},
        wait=wait,
    )


def _scenario(ease: float, costs: StepCosts | None = None, **values: Any) -> Scenario:
    costs = _costs() if costs is None else costs
    eases = np.full(4 * TOKENS + LEVELS, ease)
    known = {"score_scale": 1.0, "fade": 0.1, "timed": costs, "seed": 7, **values}
    return Scenario(name="", ease=eases, costs=costs, **known)


class Watched:
    """A policy, and what it chose."""

    reads_drafts = True
    least_chance = 0.0

    def __init__(self, policy: AdaptivePolicy):
        self.policy = policy
        self.steps: list[Step] = []

    @property
    def waits(self) -> bool:
        return self.policy.waits

    def choose(self, matches: Any) -> DraftPlan | None:
        return self.policy.choose(matches)

    def select(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        return self.policy.select(plan, tree)

    def observe(self, step: Step) -> None:
        self.steps.append(step)
        self.policy.observe(step)


def _decode(scenario: Scenario, before: Watched | None = None, start: int = 0) -> Watched:
    state = before and before.policy.state
    watched = Watched(AdaptivePolicy(scenario.timed, state, itertools.count(0, 0).__next__))
    run_policy(SimulatedText(scenario), watched, start, start + TOKENS)
    return watched


def _nodes(watched: Watched, last: int = 40) -> float:
    return float(np.mean([step.num_nodes for step in watched.steps[-last:]]))


def test_the_regret_of_simulated_texts_is_small() -> None:
    """One scenario of every kind of machine; `bench simulate` has hundreds."""
    found = simulate_regret(6)
    assert found.median <= 0.03
    assert found.p95 <= 0.08
    assert found.worst <= 0.15
    assert found.least_plain is not None
    assert found.least_plain >= 0.98
    without, stored = np.median(found.first_texts, axis=0)
    assert stored >= max(0.95, without)


def test_a_drafter_that_is_never_right_ends_in_plain_decoding() -> None:
    first = _decode(_scenario(-8.0))
    second = _decode(_scenario(-8.0), first, TOKENS)
    assert sum(step.num_nodes > 1 for step in second.steps) <= 3 * SWITCH
    assert any(step.num_nodes == 1 and step.plan for step in second.steps), "shadow drafts"
    assert sum(step.seconds or 0.0 for step in second.steps) < 1.02 * QUIET.mean * TOKENS


@pytest.mark.parametrize("scale", [0.25, 1.0, 8.0])
def test_a_boastful_or_timid_drafter_is_used_as_well(scale: float) -> None:
    shares = []
    for seed in range(7, 11):
        scenario = _scenario(1.5, score_scale=scale, seed=seed)
        text, before = SimulatedText(scenario), _decode(scenario).policy.state
        policy = AdaptivePolicy(scenario.timed, before, itertools.count(0, 0).__next__)
        seconds = run_policy(text, policy, TOKENS, 2 * TOKENS)
        plans = DraftPlan.of(1, 6, 6), DraftPlan.of(2, 6, 8), DraftPlan.of(4, 6, 16)
        best = min(run_fixed(text, plan, TOKENS, 2 * TOKENS) for plan in plans)
        shares.append(best / seconds)
    assert min(shares) > 0.93


def test_levels_are_drafted_while_they_give_more_than_their_time() -> None:
    def length(ease: float, level: float) -> float:
        steps = _decode(_scenario(ease, _costs(level=level))).steps[-30:]
        return float(np.mean([step.plan.shape.length if step.plan else 1 for step in steps]))

    assert length(0.0, 0.1) < length(0.0, 0.003)
    assert length(0.0, 0.1) < length(3.0, 0.1)
    assert length(3.0, 0.003) > 7


def test_dear_verifies_get_fewer_nodes() -> None:
    assert _nodes(_decode(_scenario(1.0, _costs("linear")))) < _nodes(_decode(_scenario(1.0)))
    assert _nodes(_decode(_scenario(-1.0, _costs("steep")))) < 1.3


def test_sizes_at_which_kernels_change_are_avoided() -> None:
    sizes = {step.num_nodes for step in _decode(_scenario(2.0, _costs("kernel steps"))).steps}
    assert not sizes & {10, 12}, "8 and 16 take less time"


def test_a_hard_beginning_does_not_decide_a_text() -> None:
    scenario = _scenario(2.0)
    scenario.ease[:60] = -8.0
    steps = _decode(scenario).steps
    assert sum(step.plan is not None for step in steps[-20:]) > 15


def _tree(*chances: float) -> Any:
    """A chain of drafts, each of this probability."""
    scores = np.cumsum(np.log(chances)).tolist()
    count = len(chances)
    known = Drafts(scores, list(range(1, count + 1)), list(range(count)), list(range(count)))
    return SimpleNamespace(
        size=count + 1,
        read=lambda: known,
        first=_kept,
        subtree=lambda drafts: _kept(len(drafts) + 1),
    )


def _kept(size: int) -> Any:
    return SimpleNamespace(size=size, padded=_kept)


def test_drafts_out_of_the_text_are_taken_where_they_promise_more() -> None:
    policy = AdaptivePolicy(StepCosts(1.0, {size: 1 + 0.05 * size for size in SIZES}))
    assert policy.choose([]) is None
    assert policy.choose([0.05]) is None
    plan = policy.choose([0.9, 0.8, 0.7])
    assert plan == LOOKUP
    assert policy.select(plan, _tree(0.9, 0.9, 0.9, 0.01, 0.5)).size == 4
    assert policy.select(plan, _tree(0.01)).size == 1


def test_a_timing_that_was_disturbed_is_corrected_in_use() -> None:
    costs = _costs()
    disturbed = {
        size: seconds * (0.3 if size == 24 else 1) for size, seconds in costs.verify.items()
    }
    timed = StepCosts(costs.plain, disturbed, costs.first, costs.level, costs.wait)
    firsts, seconds = [], []
    for seed in range(7, 13):  # single ones differ by 0.3
        right = _scenario(0.5, costs, seed=seed)
        wrong = _scenario(0.5, costs, timed=timed, seed=seed)
        first = _decode(wrong)
        assert any(step.num_nodes == 24 for step in first.steps[:8]), "the timing misleads"
        assert first.policy.state.ratios.of(24) > 2
        firsts.append(_seconds(wrong) / _seconds(right))
        both = _decode(wrong, first, TOKENS), _decode(right, _decode(right), TOKENS)
        taken, known = (sum(step.seconds or 0.0 for step in one.steps) for one in both)
        seconds.append(taken / known)
    assert np.mean(firsts) < 1.18
    assert np.mean(seconds) < 1.16


def test_a_machine_that_has_become_slower_is_used_as_well() -> None:
    """Everything takes 2.5 times as long as was timed: what pays is what paid before."""
    timed = _costs(level=0.45, wait=0.05)
    slow = StepCosts(
        plain=2.5 * timed.plain,
        verify={size: 2.5 * seconds for size, seconds in timed.verify.items()},
        first=timed.first,
        level={width: 2.5 * seconds for width, seconds in timed.level.items()},
        wait=2.5 * timed.wait,
    )

    def speed(ease: float, costs: StepCosts) -> float:
        scenario = _scenario(ease, costs, timed=timed)
        steps = _decode(scenario, _decode(scenario), TOKENS).steps
        seconds = sum(step.seconds or costs.plain for step in steps)
        return costs.plain * sum(len(step.tokens) for step in steps) / seconds

    shares = [speed(ease, slow) / speed(ease, timed) for ease in (1.0, 1.5, 2.0, 2.5)]
    assert np.mean(shares) > 0.92


def test_a_slow_learner_still_learns() -> None:
    """Learning takes half a step's time here; without it, the text before decides for ever."""
    easy, hard = _scenario(2.0), _scenario(-4.0)
    clock = itertools.count(0, 0.5).__next__
    policy = AdaptivePolicy(hard.timed, _decode(easy).policy.state, clock)
    watched = Watched(policy)
    run_policy(SimulatedText(hard), watched, 0, 2 * TOKENS)
    assert _nodes(watched, 60) < 1.5


@pytest.mark.parametrize(
    ("curve", "level", "ease"), [("steep", 0.3, 0.0), ("steep", 0.6, 0.5), ("linear", 0.5, -1.0)]
)
def test_drafting_that_was_timed_as_free_is_corrected_in_use(
    curve: str, level: float, ease: float
) -> None:
    costs = _costs(curve, level)
    timed = StepCosts(costs.plain, costs.verify, costs.first, dict.fromkeys(costs.level, 0.0))
    right, wrong = _scenario(ease, costs), _scenario(ease, costs, timed=timed)
    assert any(step.plan is not None for step in _decode(wrong).steps[:20]), "the timing misleads"
    assert _seconds(wrong) < 1.35 * _seconds(right), "uncorrected, 2 to 5 times as long"


def _seconds(scenario: Scenario) -> float:
    policy = AdaptivePolicy(scenario.timed, None, itertools.count(0, 0).__next__)
    return run_policy(SimulatedText(scenario), policy, 0, TOKENS)


def test_a_search_with_fewer_drafts_than_asked_for_is_verified_as_far_as_it_goes() -> None:
    policy = AdaptivePolicy(_costs())
    plan = policy.choose(None)
    assert plan is not None
    kept = policy.select(plan, _tree(0.99, 0.99))
    assert kept.size in (2, 3)


def test_a_fixed_plan_stays_and_waits_for_nothing() -> None:
    fixed = FixedPolicy(SHORTEST)
    fixed.observe(Step(SHORTEST, SHORTEST.num_nodes, [1], None))
    assert fixed.choose(None) == SHORTEST
    assert fixed.choose([]) is None
    tree: Any = SimpleNamespace(read=lambda: pytest.fail("drafts were read"))
    assert fixed.select(SHORTEST, tree) is tree


def test_a_tree_is_padded_where_a_larger_one_costs_less() -> None:
    verify = {size: 1.0 + 0.01 * size for size in SIZES} | {3: 1.5}
    policy = AdaptivePolicy(StepCosts(1.0, verify, {1: 0.0, 2: 0.0}, {1: 0.0, 2: 0.0}))
    costs = [policy._planner._costs.verify[COUNTS.index(count)] for count in (1, 2, 3)]
    assert costs == pytest.approx([1.02, 1.04, 1.04])
    for count, size in ((1, 2), (2, 4), (3, 4)):
        policy._planner.newest = Choice(LONGEST, count + 1)
        assert policy.select(LONGEST, _tree(*[0.9] * 10)).size == size


@pytest.mark.parametrize(("num_nodes", "size"), [(6, 6), (8, 8), (9, 16), (12, 16), (16, 16)])
def test_trees_of_a_fixed_plan_are_padded_where_that_takes_less_time(
    num_nodes: int, size: int
) -> None:
    costs = StepCosts(1.0, {size: 1.0 + 0.01 * size for size in SIZES} | {12: 1.8})
    fixed = FixedPolicy(SHORTEST, costs)
    tree = TokenTree.of(range(num_nodes), [0, *range(num_nodes - 1)])
    kept = fixed.select(SHORTEST, tree)
    assert (kept.size, kept.num_nodes) == (size, num_nodes)


def test_noise_and_trees_larger_than_those_timed_are_no_reason_to_pad() -> None:
    costs = StepCosts(1.0, {size: 1.0 if size == 16 else 1.04 for size in SIZES})
    assert costs.cheapest_size(12) == 12
    assert costs.cheapest_size(SIZES[-1] + 1) == SIZES[-1] + 1


def test_shapes_say_what_was_taken_and_what_it_gave() -> None:
    watched = _decode(_scenario(1.0))
    found = watched.policy.shapes()
    assert found[0].plan is None
    assert sum(one.steps for one in found) == len(watched.steps)
    assert sum(one.tokens for one in found) == sum(len(step.tokens) for step in watched.steps)
    assert sum(one.expected_tokens for one in found) == pytest.approx(
        sum(one.tokens for one in found), rel=0.3
    )
    plans = [one.plan for one in found[1:]]
    assert len(set(plans)) == len(plans)
    assert all(math.isfinite(one.seconds) for one in found)


def test_every_plan_on_offer_shows_all_drafts_of_its_search() -> None:
    assert all(plan.num_nodes == plan.shape.max_nodes for plan in PLANS.values())


def test_plain_steps_are_timed_now_and_then_while_drafting() -> None:
    steps = _decode(_scenario(-1.0, _costs("tiles", level=0.06))).steps
    switched = [i for i, step in enumerate(steps) if step.plan is None]
    assert 2 <= len(switched) < 40
    assert switched[1] == switched[0] + 1, "one plain step alone cannot be timed"


def test_a_chain_in_use_shows_what_a_tree_would_get() -> None:
    """The prior says that trees are no better; the third child is right as often as the first."""
    before = PolicyState()
    before.drafts.mean[1] = before.drafts.mean[0]
    policy = AdaptivePolicy(_costs("linear"), before, itertools.count(0, 0).__next__)
    watched = Watched(policy)
    run_policy(SimulatedText(_scenario(0.7, _costs("linear"))), watched, 0, TOKENS)
    shapes = [step.plan.shape.width for step in watched.steps if step.plan is not None]
    assert 2 in shapes


def test_a_sequence_begins_with_the_experience_of_the_previous_one_and_leaves_it_alone() -> None:
    before = _decode(_scenario(2.0)).policy.state
    weights, mean, ratios = before.calibration.weights, before.drafts.mean, before.ratios
    known = {size: ratios.of(size) for size in SIZES}
    policy = AdaptivePolicy(_costs("linear"), before, itertools.count(0, 0).__next__)
    assert (policy.state.calibration.weights == weights).all()
    run_policy(SimulatedText(_scenario(-2.0, _costs("linear"))), policy, 0, TOKENS)
    assert policy.state.drafts.mean.max() < before.drafts.mean.max()
    assert (before.drafts.mean == mean).all()
    assert known == {size: ratios.of(size) for size in SIZES}


def test_choices_follow_the_cost_of_steps() -> None:
    costs, before = _costs(), PolicyState()
    before.drafts.mean = 0 * before.drafts.mean
    before.drafts.chosen = np.ones_like(before.drafts.chosen)
    before.budget.switches = 0.0
    assert AdaptivePolicy(costs, before).choose([]) is not None
    for size in list(costs.verify) * 20:
        before.ratios.learn(size, 4.0)
        before.ratios.learn(1, 1.0)
    chosen = AdaptivePolicy(costs, before).choose([])
    assert chosen is None or chosen.num_nodes == 1


def test_a_guard_turns_drafts_in_flight_into_a_plain_step() -> None:
    """The second step is chosen before the first one's cost is known, and not verified."""
    policy = AdaptivePolicy(_costs(), None, itertools.count(0, 0).__next__)
    tree = _tree(0.9, 0.8, 0.7)
    first = policy.choose(None)
    assert first is not None
    policy.select(first, tree)
    second = policy.choose(None)
    assert second is not None
    policy.observe(Step(first, 4, [1], 30.0))
    assert policy.select(second, tree).size == 1
    assert policy.choose(None) is None


@pytest.mark.parametrize(
    ("ease", "curve", "level", "scale"),
    [
        (-8.0, "gentle", 0.01, 8.0),
        (-4.0, "gentle", 0.3, 1.0),
        (-1.0, "steep", 0.1, 1.0),
        (-2.0, "linear", 0.1, 4.0),
        (-8.0, "steep", 0.3, 8.0),
    ],
)
def test_sequences_of_96_tokens_lose_little_where_nothing_pays(
    ease: float, curve: str, level: float, scale: float
) -> None:
    """Allow the first one to lose more: drafting is trusted with some plain steps."""
    scenario = _scenario(ease, _costs(curve, level), score_scale=scale)
    text, before, speeds = SimulatedText(scenario), None, []
    for start in range(0, 4 * 96, 96):
        policy = AdaptivePolicy(scenario.timed, before, itertools.count(0, 0).__next__)
        seconds = run_policy(text, policy, start, start + 96, seed=start)
        speeds.append(run_fixed(text, None, start, start + 96) / seconds)
        before = policy.conclude()
    assert speeds[0] > 0.93
    assert min(speeds[1:]) > 0.97
    assert np.mean(speeds[1:]) > 0.98


def test_a_plan_of_one_node_is_of_shadow_drafts() -> None:
    scenario = _scenario(-8.0)
    second = _decode(scenario, _decode(scenario), TOKENS)
    shadows = [step.plan for step in second.steps if step.plan and step.plan.num_nodes == 1]
    assert shadows
    assert not any(step.plan.num_nodes == 1 for step in second.steps if step.num_nodes > 1)


def _lookup_policy() -> AdaptivePolicy:
    return AdaptivePolicy(StepCosts(1.0, {size: 1 + 0.1 * size for size in SIZES}))


def test_lookups_that_cost_more_than_timed_are_used_less_often() -> None:
    policy, matches = _lookup_policy(), [0.7, 0.5]
    assert policy.choose(matches) == LOOKUP
    chosen: DraftPlan | None = LOOKUP
    for _ in range(40):
        if chosen is not None:
            policy.select(chosen, _tree(0.7, 0.7))
        policy.observe(
            Step(chosen, 3 if chosen else 1, [1, 1] if chosen else [1], 2.5 if chosen else 1.0)
        )
        chosen = policy.choose(matches)
    assert chosen is None


def test_a_lookup_must_gain_more_than_one_of_which_nothing_is_kept_loses() -> None:
    policy, matches = _lookup_policy(), [0.7, 0.5]
    assert policy.choose(matches) == LOOKUP
    assert policy.select(LOOKUP, _tree(0.01)).size == 1
    ratios = policy.state.ratios
    for _ in range(2):  # one slow step changes nothing
        policy.observe(Step(LOOKUP, 1, [1], 2.0))
    assert ratios.of(EMPTY) > 1.1 * ratios.of(1)
    for _ in range(10):
        ratios.learn(EMPTY, 2.0)
        ratios.learn(1, 1.0)
    policy = AdaptivePolicy(policy._planner._timed, PolicyState(ratios=ratios))
    assert policy.choose(matches) is None
    assert policy.choose([0.99] * 15) == LOOKUP


def test_empty_lookups_are_not_charged_for_the_plain_step_after_them() -> None:
    """The first step of a row takes the next one's time if dispatching waits for the device."""
    policy, plain, promised = _lookup_policy(), Step(None, 1, [1], 1.0), [0.99] * 15
    policy.choose([])
    for _ in range(20):
        for _ in range(4):
            policy.choose([])
            policy.observe(plain)
        assert policy.choose(promised) == LOOKUP
        policy.observe(plain._replace(seconds=0.1))
        assert policy.select(LOOKUP, _tree(0.01)).size == 1
        policy.choose([])
        policy.observe(Step(LOOKUP, 1, [1], 1.9))
    assert policy.state.ratios.of(EMPTY) == pytest.approx(1.0, abs=0.05)


def test_plain_steps_without_a_network_are_all_counted() -> None:
    policy = _lookup_policy()
    for _ in range(30):
        assert policy.choose([]) is None
        policy.observe(Step(None, 1, [1], 1.5))
    assert policy.conclude().ratios.of(1) == pytest.approx(1.5, rel=0.05)
    assert policy.shapes()[0].steps == 30
