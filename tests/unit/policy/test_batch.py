"""Draft sizes of a batch: what its steps cost, and what earlier batches have shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

import numpy as np
import pytest

from mlx_redrafter.bench.lab.scenarios import LEVELS, Scenario
from mlx_redrafter.bench.lab.simulation import SimulatedText, run_fixed, run_policy
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.policy.adaptive import AdaptivePolicy, Planner
from mlx_redrafter.policy.batch import BatchPolicy, MemberPolicy, batch_costs
from mlx_redrafter.policy.plans import LOOKUP, SIZES, StepCosts
from mlx_redrafter.policy.state import PolicyState
from mlx_redrafter.trees.tree import TokenTree

SLOTS, TOKENS = 4, 60
COSTS = StepCosts(
    plain=1.0,
    verify={size: 1 + 0.02 * size for size in SIZES},
    first=dict.fromkeys((1, 2, 4), 0.0),
    level=dict.fromkeys((1, 2, 4), 0.01),
    wait=0.02,
)


class Watched(MemberPolicy):
    """The policy of one sequence of a batch, and its steps."""

    waits = False

    def __init__(self, batch: BatchPolicy):
        super().__init__(batch)
        self.batch = batch
        self.steps: list[Step] = []

    def choose(self, matches: Sequence[float] | None = None) -> DraftPlan | None:
        self.batch.choose_all([(self, matches)], 1)
        return super().choose(matches)

    def select(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        if not plan.is_shadow:
            self.batch.select_all([(self, tree)])
        return super().select(plan, tree)

    def observe(self, step: Step) -> None:
        self.steps.append(step)
        super().observe(step)


def _decode(
    batches: dict[int, PolicyState], num_slots: int = SLOTS, costs: StepCosts | None = None
) -> list[Step]:
    """Steps of a sequence in a batch whose steps cost as expected, or something else."""
    timed = batch_costs(COSTS, num_slots)
    known = {"score_scale": 1.0, "fade": 0.1, "timed": timed, "seed": 3}
    ease = np.full(4 * TOKENS + LEVELS, 0.5)
    text = SimulatedText(Scenario(name="", ease=ease, costs=costs or timed, **known))
    watched = Watched(BatchPolicy(lambda: COSTS, lambda: num_slots, batches))
    run_policy(text, watched, 0, TOKENS)
    return watched.steps


def _slower(factor: float, num_slots: int = SLOTS) -> StepCosts:
    timed = batch_costs(COSTS, num_slots)
    slower = {size: factor * seconds for size, seconds in timed.verify.items()}
    return StepCosts(timed.plain, slower, timed.first, timed.level, timed.wait)


def _drafted(steps: list[Step]) -> int:
    return sum(step.num_nodes > 1 for step in steps)


def test_more_sequences_draft_fewer_tokens_each() -> None:
    sizes = [np.mean([step.num_nodes for step in _decode({}, slots)]) for slots in (1, 4, 16)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_the_next_batch_knows_what_steps_of_this_one_cost() -> None:
    batches: dict[int, PolicyState] = {}
    for _ in range(5):
        assert 0 < _drafted(_decode(batches, costs=_slower(2.5))) <= TOKENS // 10
    assert max(batches[SLOTS].ratios.of(size) for size in SIZES) > 1.3
    assert batches[SLOTS].ratios.of(1) < 1.5, "what slows trees down is not the machine"


def test_a_new_batch_times_plain_steps_before_it_trusts_drafts() -> None:
    """Timed on a busy machine, plain steps seem ten times as long as they are, and trees free."""
    timed = batch_costs(COSTS, SLOTS)
    verify = {size: seconds / 3 for size, seconds in timed.verify.items()}
    true = replace(timed, plain=timed.plain / 10, verify=verify)
    batches: dict[int, PolicyState] = {}
    first = _decode(batches, costs=true)
    assert [step.num_nodes for step in first[:3]] == [1, 1, 1]
    assert _drafted(first) <= 4


def test_another_number_of_sequences_has_times_of_its_own() -> None:
    batches: dict[int, PolicyState] = {}
    for _ in range(5):
        _decode(batches, costs=_slower(2.5))
    assert _drafted(_decode(batches, SLOTS // 2)) > TOKENS // 10
    assert sorted(batches) == [SLOTS // 2, SLOTS]
    assert max(batches[SLOTS].ratios.of(size) for size in SIZES) > 1.3
    assert batches[SLOTS // 2].ratios.of(1) == pytest.approx(1.0, abs=0.15)


def test_earlier_sequences_have_shown_what_drafts_yield_but_not_what_they_cost() -> None:
    before = PolicyState()
    for _ in range(5):
        before.ratios.learn(8, 9.0)
    before.drafts.mean = 0 * before.drafts.mean
    batches: dict[int, PolicyState] = {}
    Watched(BatchPolicy(lambda: COSTS, lambda: SLOTS, batches, lambda: before)).choose()
    assert batches[SLOTS].ratios.of(8) == 1.0
    assert batches[SLOTS].drafts.mean.max() == 0.0
    assert before.ratios.of(8) > 2, "as it was"


def test_sequences_that_end_soon_have_shown_what_their_steps_cost() -> None:
    batches: dict[int, PolicyState] = {}
    slots = SLOTS
    member = Watched(BatchPolicy(lambda: COSTS, lambda: slots, batches))
    seconds = 1.5 * batch_costs(COSTS, SLOTS).plain
    for _ in range(8):
        member.observe(Step(member.choose(), 4, [0], 2 * seconds))
    slots = SLOTS // 2
    member.choose()
    assert batches[SLOTS].ratios.of(4) > 1.2


@pytest.mark.parametrize("num_slots", [2, 4, 8])
@pytest.mark.parametrize("ease", [-8.0, -1.0, 1.0])
def test_no_batch_is_slower_than_plain_decoding(num_slots: int, ease: float) -> None:
    timed = batch_costs(COSTS, num_slots)
    eases = np.full(6 * TOKENS + LEVELS, ease)
    known = {"score_scale": 1.0, "fade": 0.1, "timed": timed, "seed": 3}
    text = SimulatedText(Scenario(name="", ease=eases, costs=timed, **known))
    batches: dict[int, PolicyState] = {}
    for start in (0, 3 * TOKENS):
        stop = start + 3 * TOKENS
        watched = Watched(BatchPolicy(lambda: COSTS, lambda: num_slots, batches))
        plain = run_fixed(text, None, start, stop)
        assert run_policy(text, watched, start, stop) < 1.04 * plain


def _chain(chances: list[float]) -> TokenTree:
    """Return a chain of drafts with these probabilities."""
    logs = [log(chance) for chance in chances]
    return TokenTree.of([0, *[1] * len(chances)], [0, *range(len(chances))], logs)


def test_all_members_verify_as_many_drafts_as_pay_for_all_of_them() -> None:
    """Good drafts of one sequence do not pay for the rows of the others; those of all do."""
    good, bad = [0.9, 0.8, 0.7, 0.6], [0.1, 0.05, 0.02, 0.01]
    slow = StepCosts(plain=1.0, verify={size: 1 + 0.1 * size for size in SIZES})
    sizes = []
    for chances in ([good, bad, bad, bad], [good] * 4):
        batch = BatchPolicy(lambda: slow, lambda: 4, {})
        members = [batch.join(AdaptivePolicy(slow)) for _ in chances]
        found = [member for member in members if isinstance(member, MemberPolicy)]
        batch.choose_all(list(zip(found, chances, strict=True)), 4)
        plans = [member.choose(one) for member, one in zip(found, chances, strict=True)]
        if plans[0] is None:
            sizes.append([1] * 4)
            continue
        trees = list(zip(found, map(_chain, chances), strict=True))
        batch.select_all(trees)
        sizes.append([member.select(plans[0], tree).size for member, tree in trees])
    assert sizes[0] == [1] * 4
    assert sizes[1] == [sizes[1][0]] * 4
    assert sizes[1][0] > 1


def test_a_lookup_pays_with_fewer_drafts_the_less_its_batch_costs() -> None:
    planners = [Planner(batch_costs(COSTS, slots), PolicyState()) for slots in (1, 4, 16)]
    chances = [planner.least_chance for planner in planners]
    assert 0 < chances[0] < chances[1] < chances[2] < 1
    planners[0].learner.guard.learn_drafted(100.0, 1)
    assert planners[0].least_chance > 1, "the guard stops drafts"


def test_members_without_a_lookup_decode_plainly_next_to_those_with_one() -> None:
    costs = StepCosts(COSTS.plain, COSTS.verify)
    batch = BatchPolicy(lambda: costs, lambda: 2, {})
    members = [MemberPolicy(batch) for _ in range(2)]
    all_matches: list[list[float]] = [[0.9, 0.9, 0.8], []]
    batch.choose_all(list(zip(members, all_matches, strict=True)), 2)
    plans = [member.choose(one) for member, one in zip(members, all_matches, strict=True)]
    assert plans[0] is not None
    assert plans[0].from_text
    assert plans[1] is None


@pytest.mark.parametrize("num_nodes", [9, 13])
def test_the_largest_tree_of_a_step_may_have_a_size_that_was_not_timed(num_nodes: int) -> None:
    batch = BatchPolicy(lambda: COSTS, lambda: 2, {})
    member = MemberPolicy(batch)
    batch.choose_all([(member, [0.9] * 15)], 2)
    member.choose([0.9] * 15)
    member.observe(Step(LOOKUP, num_nodes, [1] * 4, 0.01))
    batch.choose_all([(member, [0.9] * 15)], 2)
    counted = [
        one.plan.num_nodes for one in batch.current().learner.shapes() if one.plan and one.steps
    ]
    assert counted == [min(size for size in SIZES if size >= num_nodes)]
