"""Draft sizes of a batch: what its steps cost, and what earlier batches have shown."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_redrafter.bench.lab.scenarios import LEVELS, Scenario
from mlx_redrafter.bench.lab.simulation import SimulatedText, run_fixed, run_policy
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.policy.adaptive import Experience
from mlx_redrafter.policy.batch import BatchPolicy, MemberPolicy, batch_costs
from mlx_redrafter.policy.plans import SIZES
from mlx_redrafter.policy.step_costs import StepCosts

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
        self.steps: list[Step] = []

    def observe(self, step: Step) -> None:
        self.steps.append(step)
        super().observe(step)


def _decode(
    batches: dict[int, Experience], num_slots: int = SLOTS, costs: StepCosts | None = None
) -> list[Step]:
    """Steps of a sequence in a batch whose steps cost as expected, or something else."""
    timed = batch_costs(COSTS, num_slots)
    known = {"score_scale": 1.0, "fade": 0.1, "timed": timed, "seed": 3}
    ease = np.full(4 * TOKENS + LEVELS, 0.5)
    text = SimulatedText(Scenario(name="", ease=ease, costs=costs or timed, **known))
    watched = Watched(BatchPolicy(COSTS, lambda: num_slots, batches))
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
    batches: dict[int, Experience] = {}
    first = _drafted(_decode(batches, costs=_slower(4.0)))
    assert first > 0, "expected to pay"
    assert sum(_drafted(_decode(batches, costs=_slower(4.0))) for _ in range(3)) < 3 * first
    assert batches[SLOTS].ratios.of(1) < 1.5, "what slows trees down is not the machine"


def test_another_number_of_sequences_has_times_of_its_own() -> None:
    batches: dict[int, Experience] = {}
    _decode(batches, costs=_slower(2.5))
    assert _drafted(_decode(batches, SLOTS // 2)) > TOKENS // 10
    assert sorted(batches) == [SLOTS // 2, SLOTS]
    assert max(batches[SLOTS].ratios.of(size) for size in SIZES) > 1.3
    assert batches[SLOTS // 2].ratios.of(1) == pytest.approx(1.0, abs=0.15)


def test_earlier_sequences_have_shown_what_drafts_yield_but_not_what_they_cost() -> None:
    before = Experience()
    for _ in range(5):
        before.ratios.learn(8, 9.0)
    before.drafts.mean = 0 * before.drafts.mean
    batches: dict[int, Experience] = {}
    BatchPolicy(COSTS, lambda: SLOTS, batches, before)
    assert batches[SLOTS].ratios.of(8) == 1.0
    assert batches[SLOTS].drafts.mean.max() == 0.0
    assert before.ratios.of(8) > 2, "as it was"


def test_sequences_that_end_soon_have_shown_what_their_steps_cost() -> None:
    batches: dict[int, Experience] = {}
    slots = SLOTS
    batch = BatchPolicy(COSTS, lambda: slots, batches)
    member = batch.new_member()
    seconds = 1.5 * batch_costs(COSTS, SLOTS).plain
    for _ in range(8):
        member.observe(Step(member.choose(None), 4, [0], 2 * seconds))
    slots = SLOTS // 2
    member.choose(None)
    assert batches[SLOTS].ratios.of(4) > 1.2


@pytest.mark.parametrize("num_slots", [2, 4, 8])
@pytest.mark.parametrize("ease", [-8.0, -1.0, 1.0])
def test_no_batch_is_slower_than_plain_decoding(num_slots: int, ease: float) -> None:
    timed = batch_costs(COSTS, num_slots)
    eases = np.full(6 * TOKENS + LEVELS, ease)
    known = {"score_scale": 1.0, "fade": 0.1, "timed": timed, "seed": 3}
    text = SimulatedText(Scenario(name="", ease=eases, costs=timed, **known))
    batches: dict[int, Experience] = {}
    for start in (0, 3 * TOKENS):
        stop = start + 3 * TOKENS
        watched = Watched(BatchPolicy(COSTS, lambda: num_slots, batches))
        plain = run_fixed(text, None, start, stop)
        assert run_policy(text, watched, start, stop) < 1.04 * plain


def test_all_members_follow_one_decision() -> None:
    batch = BatchPolicy(COSTS, lambda: 2, {})
    members = [batch.new_member() for _ in range(2)]
    plans = [[member.choose(None) for member in members] for _ in range(3)]
    assert all(first == second for first, second in plans)
    assert batch.num_decisions == 3
