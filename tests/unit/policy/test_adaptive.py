"""The choice of plans in simulated sequences and batches, and how it changes."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import log
from operator import mul
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlx_redrafter.bench.lab.scenarios import CURVES, LEVELS, QUIET, Scenario
from mlx_redrafter.bench.lab.simulation import SimulatedText, run_fixed, run_policy
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.adaptive import SWITCH, AdaptivePolicy, Planner
from mlx_redrafter.policy.batch import BatchPolicy, MemberPolicy, batch_costs
from mlx_redrafter.policy.plans import (
    EMPTY,
    LOOKUP,
    SHADOW,
    SHORTEST,
    SIZES,
    Choice,
    FixedPolicy,
    Guard,
    StepCosts,
)
from mlx_redrafter.policy.state import PolicyState
from mlx_redrafter.trees.tree import TokenTree

TOKENS = 200


def _costs(curve: str = "gentle", level: float = 0.01, wait: float = 0.02) -> StepCosts:
    levels = {width: level * factor for width, factor in ((1, 1.0), (2, 1.1), (4, 1.3))}
    verify = {size: CURVES[curve](size) for size in SIZES}
    return StepCosts(1.0, verify, dict.fromkeys(levels, 0.0), levels, wait)


def _scenario(ease: float, costs: StepCosts | None = None, **values: Any) -> Scenario:
    costs = costs or _costs()
    known = {"score_scale": 1.0, "fade": 0.1, "timed": costs, "seed": 7, **values}
    return Scenario(name="", ease=np.full(4 * TOKENS + LEVELS, ease), costs=costs, **known)


class Watched(AdaptivePolicy):
    """A policy whose own work takes as long each time, by default no time, and its steps."""

    def __init__(self, costs: StepCosts, before: PolicyState | None = None, work: float = 0):
        super().__init__(costs, before, itertools.count(0, work).__next__)
        self.steps: list[Step] = []
        self.seconds = 0.0  # of the text, where no step is disturbed

    def observe(self, step: Step) -> None:
        self.steps.append(step)
        super().observe(step)


def _decode(scenario: Scenario, before: Watched | None = None, start: int = 0) -> Watched:
    policy = Watched(scenario.timed, before and before.state)
    policy.seconds = run_policy(SimulatedText(scenario), policy, start, start + TOKENS)
    return policy


def test_a_drafter_that_is_never_right_ends_in_plain_decoding():
    first = _decode(_scenario(-8.0))
    second = _decode(_scenario(-8.0), first, TOKENS)
    assert sum(step.num_nodes > 1 for step in second.steps) <= 3 * SWITCH
    shadows = [step for step in second.steps if step.plan and step.plan.num_nodes == 1]
    assert shadows
    assert all(step.num_nodes == 1 for step in shadows)
    assert sum(step.seconds or 0.0 for step in second.steps) < 1.02 * QUIET.mean * TOKENS


@pytest.mark.parametrize("scale", [0.25, 1.0, 8.0])
def test_a_boastful_or_timid_drafter_is_used_as_well(scale):
    shares = []
    for seed in range(7, 11):
        scenario = _scenario(1.5, score_scale=scale, seed=seed)
        text, before = SimulatedText(scenario), _decode(scenario).state
        policy = Watched(scenario.timed, before)
        seconds = run_policy(text, policy, TOKENS, 2 * TOKENS)
        plans = DraftPlan.of(1, 6, 6), DraftPlan.of(2, 6, 8), DraftPlan.of(4, 6, 16)
        best = min(run_fixed(text, plan, TOKENS, 2 * TOKENS) for plan in plans)
        shares.append(best / seconds)
    assert min(shares) > 0.93


def test_sizes_at_which_kernels_change_are_avoided():
    sizes = {step.num_nodes for step in _decode(_scenario(2.0, _costs("kernel steps"))).steps}
    assert not sizes & {10, 12}, "8 and 16 take less time"


def _chain(path_chances: Sequence[float]) -> TokenTree:
    """A chain of drafts that are right, with all before them, with these probabilities."""
    count = len(path_chances)
    return TokenTree.of(range(count + 1), [0, *range(count)], [*map(log, path_chances)])


def _tree(*chances: float) -> TokenTree:
    """A chain of drafts, each of this probability if those before it are right."""
    return _chain([*accumulate(chances, mul)])


def test_drafts_out_of_the_text_are_taken_where_they_promise_more():
    policy = _lookup_policy()
    assert policy.choose([]) is None
    assert policy.choose([0.05]) is None
    plan = policy.choose([0.9, 0.8, 0.7])
    assert plan == LOOKUP
    assert policy.select(plan, _tree(0.9, 0.9, 0.9, 0.01, 0.5)).size == 4
    assert policy.select(plan, _tree(0.01)).size == 1


def test_a_timing_that_was_disturbed_is_corrected_in_use():
    costs = _costs()
    timed = replace(costs, verify=costs.verify | {24: 0.3 * costs.verify[24]})
    firsts, seconds = [], []
    for seed in range(7, 13):  # single ones differ by 0.3
        right = _scenario(0.5, costs, seed=seed)
        wrong = _scenario(0.5, costs, timed=timed, seed=seed)
        first, undisturbed = _decode(wrong), _decode(right)
        assert any(step.num_nodes == 24 for step in first.steps[:8]), "the timing misleads"
        assert first.state.ratios.of(24) > 2
        firsts.append(first.seconds / undisturbed.seconds)
        both = _decode(wrong, first, TOKENS), _decode(right, undisturbed, TOKENS)
        taken, known = (sum(step.seconds or 0.0 for step in one.steps) for one in both)
        seconds.append(taken / known)
    assert np.mean(firsts) < 1.18
    assert np.mean(seconds) < 1.16


def test_a_machine_that_has_become_slower_is_used_as_well():
    """Everything takes 2.5 times as long as was timed: what pays is what paid before."""
    timed = _costs(level=0.45, wait=0.05)
    verify, level = ({k: 2.5 * s for k, s in one.items()} for one in (timed.verify, timed.level))
    slow = StepCosts(2.5 * timed.plain, verify, timed.first, level, 2.5 * timed.wait)

    def speed(ease: float, costs: StepCosts) -> float:
        scenario = _scenario(ease, costs, timed=timed)
        steps = _decode(scenario, _decode(scenario), TOKENS).steps
        seconds = sum(step.seconds or costs.plain for step in steps)
        return costs.plain * sum(len(step.tokens) for step in steps) / seconds

    shares = [speed(ease, slow) / speed(ease, timed) for ease in (1.0, 1.5, 2.0, 2.5)]
    assert np.mean(shares) > 0.92


def test_a_slow_learner_still_learns():
    """Learning takes half a step's time here; without it, the text before decides for ever."""
    easy, hard = _scenario(2.0), _scenario(-4.0)
    policy = Watched(hard.timed, _decode(easy).state, work=0.5)
    run_policy(SimulatedText(hard), policy, 0, 2 * TOKENS)
    assert np.mean([step.num_nodes for step in policy.steps[-60:]]) < 1.5


@pytest.mark.parametrize(
    ("curve", "level", "ease"), [("steep", 0.3, 0.0), ("steep", 0.6, 0.5), ("linear", 0.5, -1.0)]
)
def test_drafting_that_was_timed_as_free_is_corrected_in_use(curve, level, ease):
    costs = _costs(curve, level)
    timed = replace(costs, level=dict.fromkeys(costs.level, 0.0), wait=0.0)
    right, wrong = _decode(_scenario(ease, costs)), _decode(_scenario(ease, costs, timed=timed))
    assert any(step.plan is not None for step in wrong.steps[:20]), "the timing misleads"
    assert wrong.seconds < 1.35 * right.seconds, "uncorrected, 2 to 5 times as long"


def test_trees_of_a_fixed_plan_are_padded_where_that_takes_less_time():
    verify = {size: 1.0 + 0.01 * size for size in SIZES}
    fixed = FixedPolicy(SHORTEST, StepCosts(1.0, verify | {12: 1.8}))
    assert fixed.choose(None) == SHORTEST
    assert fixed.choose([]) is None
    for num_nodes, size in ((6, 6), (8, 8), (9, 16), (12, 16), (16, 16)):
        tree = TokenTree.of(range(num_nodes), [0, *range(num_nodes - 1)])
        kept = fixed.select(SHORTEST, tree)
        assert (kept.size, kept.num_nodes) == (size, num_nodes)
    noisy = StepCosts(1.0, {size: 1.0 if size == 16 else 1.04 for size in SIZES})
    assert noisy.cheapest_size(12) == 12
    assert noisy.cheapest_size(SIZES[-1] + 1) == SIZES[-1] + 1, "larger than those timed"
    unread: Any = SimpleNamespace(read=lambda: pytest.fail("drafts were read"))
    assert FixedPolicy(SHORTEST).select(SHORTEST, unread) is unread


def test_shapes_say_what_was_taken_and_what_it_gave():
    policy = _decode(_scenario(1.0))
    found = policy.shapes()
    assert found[0].plan is None
    assert sum(one.steps for one in found) == len(policy.steps)
    assert sum(one.tokens for one in found) == sum(len(step.tokens) for step in policy.steps)
    assert sum(one.expected_tokens for one in found) == pytest.approx(
        sum(one.tokens for one in found), rel=0.3
    )
    plans = [one.plan for one in found[1:]]
    assert len(set(plans)) == len(plans)
    assert all(math.isfinite(one.seconds) for one in found)


def test_plain_steps_are_timed_now_and_then_while_drafting():
    steps = _decode(_scenario(-1.0, _costs("tiles", level=0.06))).steps
    switched = [i for i, step in enumerate(steps) if step.plan is None]
    assert 2 <= len(switched) < 40
    assert switched[1] == switched[0] + 1, "one plain step alone cannot be timed"


def test_a_chain_in_use_shows_what_a_tree_would_get():
    """The prior says that trees are no better; the third child is right as often as the first."""
    before = PolicyState()
    before.drafts.mean[1] = before.drafts.mean[0]
    policy = Watched(_costs("linear"), before)
    run_policy(SimulatedText(_scenario(0.7, _costs("linear"))), policy, 0, TOKENS)
    shapes = [step.plan.shape.width for step in policy.steps if step.plan is not None]
    assert 2 in shapes


def test_a_sequence_begins_with_the_experience_of_the_previous_one_and_leaves_it_alone():
    before = _decode(_scenario(2.0)).state
    weights, mean, ratios = before.calibration.weights, before.drafts.mean, before.ratios
    known = {size: ratios.of(size) for size in SIZES}
    policy = Watched(_costs("linear"), before)
    assert (policy.state.calibration.weights == weights).all()
    run_policy(SimulatedText(_scenario(-2.0, _costs("linear"))), policy, 0, TOKENS)
    assert policy.state.drafts.mean.max() < before.drafts.mean.max()
    assert (before.drafts.mean == mean).all()
    assert known == {size: ratios.of(size) for size in SIZES}


def test_a_guard_turns_drafts_in_flight_into_a_plain_step():
    """The second step is chosen before the first one's cost is known, and not verified."""
    policy = Watched(_costs())
    tree = _tree(0.9, 0.8, 0.7)
    first: Any = policy.choose(None)
    policy.select(first, tree)
    second: Any = policy.choose(None)
    policy.observe(Step(first, 4, [1], 30.0))
    assert policy.select(second, tree).size == 1
    assert policy.choose(None) is None


UNPAYING = [
    (-8.0, "gentle", 0.01, 8.0),
    (-4.0, "gentle", 0.3, 1.0),
    (-1.0, "steep", 0.1, 1.0),
    (-2.0, "linear", 0.1, 4.0),
]


@pytest.mark.parametrize(("ease", "curve", "level", "scale"), UNPAYING)
def test_sequences_of_96_tokens_lose_little_where_nothing_pays(ease, curve, level, scale):
    """Allow the first one to lose more: drafting is trusted with some plain steps."""
    scenario = _scenario(ease, _costs(curve, level), score_scale=scale)
    text, before, speeds = SimulatedText(scenario), None, []
    for start in range(0, 4 * 96, 96):
        policy = Watched(scenario.timed, before)
        seconds = run_policy(text, policy, start, start + 96, seed=start)
        speeds.append(run_fixed(text, None, start, start + 96) / seconds)
        before = policy.conclude()
    assert speeds[0] > 0.93
    assert min(speeds[1:]) > 0.97
    assert np.mean(speeds[1:]) > 0.98


def _lookup_policy() -> AdaptivePolicy:
    return AdaptivePolicy(StepCosts(1.0, {size: 1 + 0.1 * size for size in SIZES}))


def test_lookups_that_cost_more_than_timed_are_used_less_often():
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


def test_a_lookup_must_gain_more_than_one_of_which_nothing_is_kept_loses():
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


def test_empty_lookups_are_not_charged_for_the_plain_step_after_them():
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


def test_drafts_that_were_read_in_vain_cost_more_than_shadow_drafts():
    """Plain steps and shadow drafts hide the host's work, which the others do not."""
    planner = Watched(_costs(wait=0.0))._planner
    timed = planner._costs.timed(SHORTEST, 1, waits=False)
    for seconds, waits in 20 * [(timed, False), (1.5 * timed, True)]:
        step = Step(SHORTEST, 1, [1], seconds)
        planner.learner.observe_time(step, Choice(SHORTEST, waits=waits), 1, 1, in_row=False)
    planner._find_best()
    ratios, costs = planner.state.ratios, planner._costs
    assert ratios.of(EMPTY) / ratios.of(SHADOW) == pytest.approx(1.5, rel=0.1)
    assert costs.waiting[0, 0, 0] > 1.2 * costs.step[0, 0, 0]
    assert costs.verify[0] > 1.2 * costs.plain


def test_plain_steps_without_a_network_are_all_counted():
    policy = _lookup_policy()
    for _ in range(30):
        assert policy.choose([]) is None
        policy.observe(Step(None, 1, [1], 1.5))
    assert policy.conclude().ratios.of(1) == pytest.approx(1.5, rel=0.05)
    assert policy.shapes()[0].steps == 30


SLOTS, BATCH_TOKENS = 4, 60
COSTS = _costs()


class WatchedMember(MemberPolicy):
    """The policy of one sequence of a batch, and its steps."""

    waits = False

    def __init__(self, batch: BatchPolicy):
        super().__init__(batch)
        self.batch = batch
        self.steps: list[Step] = []

    def choose(self, matches: Sequence[float] | None = None) -> DraftPlan | None:
        self.batch.choose_all([(self, matches)], 1, 0.0)
        return super().choose(matches)

    def select(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        if not plan.is_shadow:
            self.batch.select_all([(self, tree)])
        return super().select(plan, tree)

    def observe(self, step: Step) -> None:
        self.steps.append(step)
        super().observe(step)


def _batch_text(num_slots: int, ease: float, costs: StepCosts | None = None) -> SimulatedText:
    """A sequence of a batch whose steps cost as expected, or something else."""
    timed = batch_costs(COSTS, num_slots)
    return SimulatedText(_scenario(ease, costs or timed, timed=timed, seed=3))


def _decode_batch(
    batches: dict[int, PolicyState], num_slots: int = SLOTS, costs: StepCosts | None = None
) -> list[Step]:
    watched = WatchedMember(BatchPolicy(lambda: COSTS, lambda: num_slots, batches))
    run_policy(_batch_text(num_slots, 0.5, costs), watched, 0, BATCH_TOKENS)
    return watched.steps


def _drafted(steps: list[Step]) -> int:
    return sum(step.num_nodes > 1 for step in steps)


def _batch_of(num_slots: int, costs: StepCosts = COSTS) -> BatchPolicy:
    state = PolicyState(guard=Guard(costs.plain))
    return BatchPolicy(lambda: costs, lambda: num_slots, {num_slots: state})


def _choose_all(
    batch: BatchPolicy, members: Sequence[MemberPolicy], matches: Sequence[list[float]]
) -> list[DraftPlan | None]:
    """Let all members choose their plans, given the chances of what a lookup would propose."""
    batch.choose_all(list(zip(members, matches, strict=True)), len(members), 0.0)
    return [one.choose(known) for one, known in zip(members, matches, strict=True)]


def test_more_sequences_draft_fewer_tokens_each():
    sizes = [np.mean([step.num_nodes for step in _decode_batch({}, slots)]) for slots in (1, 4, 16)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_new_batch_times_plain_steps_before_it_trusts_drafts():
    """Timed on a busy machine, plain steps seem ten times as long as they are, and trees free."""
    timed = batch_costs(COSTS, SLOTS)
    verify = {size: seconds / 3 for size, seconds in timed.verify.items()}
    true = replace(timed, plain=timed.plain / 10, verify=verify)
    batches: dict[int, PolicyState] = {}
    first = _decode_batch(batches, costs=true)
    assert [step.num_nodes for step in first[:3]] == [1, 1, 1]
    assert _drafted(first) <= 4


def test_what_plain_steps_cost_another_process_is_not_trusted():
    """It shared a busy machine, on which plain steps were slow."""
    batches: dict[int, PolicyState] = {}
    true, slow = batch_costs(COSTS, SLOTS), 3 * batch_costs(COSTS, SLOTS).plain
    dear = replace(true, verify={k: 3 * seconds for k, seconds in true.verify.items()})
    _decode_batch(batches, costs=replace(dear, plain=slow))
    stored = PolicyState.restored(batches[SLOTS].stored())
    first = _decode_batch({SLOTS: replace(stored, guard=None)}, costs=dear)
    assert [step.num_nodes for step in first[:3]] == [1, 1, 1]
    assert _drafted(first) < _drafted(_decode_batch({SLOTS: stored}, costs=dear))


def test_another_number_of_sequences_has_times_of_its_own():
    """The next batch of as many knows what steps of this one cost."""
    batches, timed = dict[int, PolicyState](), batch_costs(COSTS, SLOTS)
    slower = replace(timed, verify={k: 2.5 * seconds for k, seconds in timed.verify.items()})
    drafted = [_drafted(_decode_batch(batches, costs=slower)) for _ in range(5)]
    assert min(drafted) > 0
    assert sum(drafted) <= 5 * BATCH_TOKENS // 10
    assert batches[SLOTS].ratios.of(1) < 1.5, "what slows trees down is not the machine"
    assert _drafted(_decode_batch(batches, SLOTS // 2)) > BATCH_TOKENS // 10
    assert sorted(batches) == [SLOTS // 2, SLOTS]
    assert max(batches[SLOTS].ratios.of(size) for size in SIZES) > 1.3
    assert batches[SLOTS // 2].ratios.of(1) == pytest.approx(1.0, abs=0.15)


def test_earlier_sequences_have_shown_what_drafts_yield_but_not_what_they_cost():
    before = PolicyState()
    for _ in range(5):
        before.ratios.learn(8, 9.0)
    before.drafts.mean = 0 * before.drafts.mean
    batches: dict[int, PolicyState] = {}
    WatchedMember(BatchPolicy(lambda: COSTS, lambda: SLOTS, batches, lambda: before)).choose()
    assert batches[SLOTS].ratios.of(8) == 1.0
    assert batches[SLOTS].drafts.mean.max() == 0.0
    assert before.ratios.of(8) > 2, "as it was"


def test_sequences_that_end_soon_have_shown_what_their_steps_cost():
    batches: dict[int, PolicyState] = {}
    slots = SLOTS
    member = WatchedMember(BatchPolicy(lambda: COSTS, lambda: slots, batches))
    seconds = 1.5 * batch_costs(COSTS, SLOTS).plain
    for _ in range(8):
        member.observe(Step(member.choose(), 4, [0], 2 * seconds))
    slots = SLOTS // 2
    member.choose()
    assert batches[SLOTS].ratios.of(4) > 1.2


@pytest.mark.parametrize("num_slots", [2, 4, 8])
@pytest.mark.parametrize("ease", [-8.0, -1.0, 1.0])
def test_no_batch_is_slower_than_plain_decoding(num_slots, ease):
    text = _batch_text(num_slots, ease)
    batches: dict[int, PolicyState] = {}
    for start in (0, 3 * BATCH_TOKENS):
        stop = start + 3 * BATCH_TOKENS
        watched = WatchedMember(BatchPolicy(lambda: COSTS, lambda: num_slots, batches))
        plain = run_fixed(text, None, start, stop)
        assert run_policy(text, watched, start, stop) < 1.04 * plain


def test_all_members_verify_as_many_drafts_as_pay_for_all_of_them():
    """Good drafts of one sequence do not pay for the rows of the others; those of all do."""
    good, bad = [0.9, 0.8, 0.7, 0.6], [0.1, 0.05, 0.02, 0.01]
    slow = StepCosts(plain=1.0, verify={size: 1 + 0.1 * size for size in SIZES})
    sizes = []
    for chances in ([good, bad, bad, bad], [good] * 4):
        batch = _batch_of(4, slow)
        members: list[Any] = [batch.join(AdaptivePolicy(slow)) for _ in chances]
        plan, *_ = _choose_all(batch, members, chances)
        trees = list(zip(members, map(_chain, chances), strict=True))
        if plan is not None:
            batch.select_all(trees)
        sizes.append([one.select(plan, tree).size if plan else 1 for one, tree in trees])
    assert sizes[0] == [1] * 4
    assert sizes[1] == [sizes[1][0]] * 4
    assert sizes[1][0] > 1


def test_a_lookup_pays_with_fewer_drafts_the_less_its_batch_costs():
    planners = [Planner(batch_costs(COSTS, slots), PolicyState()) for slots in (1, 4, 16)]
    chances = [planner.least_chance for planner in planners]
    assert 0 < chances[0] < chances[1] < chances[2] < 1
    planners[0].learner.guard.learn_drafted(100.0, 1)
    assert planners[0].least_chance > 1, "the guard stops drafts"


def test_no_pass_of_a_batch_has_far_more_rows_than_were_timed():
    largest = [max(batch_costs(COSTS, slots).verify, default=1) for slots in (1, 4, 16, 128)]
    assert largest == [32, 32, 8, 1]


def test_drafts_of_some_texts_do_not_slow_another_one():
    """Steps of eight nodes cost five plain ones; three texts get eight tokens, and one gets one."""
    costs = StepCosts(1.0, {size: 0.75 + 0.25 * size for size in SIZES})
    batch, timed = _batch_of(SLOTS, costs), batch_costs(costs, SLOTS)
    members = [MemberPolicy(batch) for _ in range(SLOTS)]
    chances = [*[[0.95] * 15] * 3, []]
    seconds, num_tokens, num_drafted = 0.0, np.zeros(SLOTS), 0
    for _ in range(100):
        plans = _choose_all(batch, members, chances)
        drafting = [one for one, plan in zip(members, plans, strict=True) if plan is not None]
        batch.select_all([(one, _chain([0.95] * 15)) for one in drafting])
        sizes = [batch.selected[one].size if one in drafting else 1 for one in members]
        step = timed.verify.get(max(sizes), timed.plain)
        seconds, num_drafted = seconds + step, num_drafted + (max(sizes) > 1)
        for one, plan, size in zip(members, plans, sizes, strict=True):
            one.observe(Step(plan, size, [0] * size, step))
        num_tokens += sizes
    assert num_drafted > 0
    assert seconds < 1.1 * timed.plain * num_tokens.min()


def test_lookups_of_a_batch_that_do_not_pay_get_one_percent_of_the_hosts_time():
    batch = _batch_of(2)
    member, plain = MemberPolicy(batch), batch_costs(COSTS, 2).plain
    num_looked = 0
    for _ in range(1000):
        looks = batch.least_chance <= 1
        num_looked += looks
        found = [0.001] if looks else []
        batch.choose_all([(member, found)], 2, 0.1 * plain if looks else 0.0)
        member.observe(Step(member.choose(found), 1, [0], plain))
    assert num_looked == pytest.approx(100, abs=5)


def test_members_without_a_lookup_decode_plainly_next_to_those_with_one():
    batch = _batch_of(2, StepCosts(COSTS.plain, COSTS.verify))
    plans = _choose_all(batch, [MemberPolicy(batch) for _ in range(2)], [[0.9, 0.9, 0.8], []])
    assert [plan and plan.from_text for plan in plans] == [True, None]


def test_the_largest_tree_of_a_step_may_have_a_size_that_was_not_timed():
    batch = _batch_of(2)
    members, matches = [MemberPolicy(batch) for _ in range(2)], [[0.9] * 15] * 2
    _choose_all(batch, members, matches)
    members[0].observe(Step(LOOKUP, 13, [1] * 4, 0.01))
    _choose_all(batch, members, matches)
    shapes = batch.current().learner.shapes()
    assert [one.plan.num_nodes for one in shapes if one.plan and one.steps] == [16]
