"""How much a batch drafts: what its steps take, and what earlier batches have shown."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_redrafter.bench.lab.scenarios import LEVELS, Scenario
from mlx_redrafter.bench.lab.simulation import SimulatedText, run_policy
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.policy.candidates import SIZES
from mlx_redrafter.policy.experience import Experience
from mlx_redrafter.policy.joint import JointPolicy, TextPolicy, batch_costs
from mlx_redrafter.policy.step_costs import StepCosts

SLOTS, TOKENS = 4, 60
COSTS = StepCosts(
    plain=1.0,
    verify={size: 1 + 0.02 * size for size in SIZES},
    first=dict.fromkeys((1, 2, 4), 0.0),
    level=dict.fromkeys((1, 2, 4), 0.01),
    wait=0.02,
)


class Watched(TextPolicy):
    """The policy of one text of a batch, and its steps."""

    waits = False

    def __init__(self, joint: JointPolicy):
        super().__init__(joint)
        self.steps: list[Step] = []

    def observe(self, step: Step) -> None:
        self.steps.append(step)
        super().observe(step)


def _batch(batches: dict[int, Experience], num_slots: int = SLOTS, factor: float = 2.5) -> int:
    """Steps with drafts of a text in a batch whose verifies take so many times what is expected."""
    timed = batch_costs(COSTS, num_slots)
    slower = {size: factor * seconds for size, seconds in timed.verify.items()}
    costs = StepCosts(timed.plain, slower, timed.first, timed.level, timed.wait)
    known = {"score_scale": 1.0, "fade": 0.1, "timed": timed, "seed": 3}
    ease = np.full(4 * TOKENS + LEVELS, 0.5)
    text = SimulatedText(Scenario(name="", ease=ease, costs=costs, **known))
    watched = Watched(JointPolicy(COSTS, lambda: num_slots, batches))
    run_policy(text, watched, 0, TOKENS)
    return sum(step.num_nodes > 1 for step in watched.steps)


def test_the_next_batch_knows_what_steps_of_this_one_take() -> None:
    batches: dict[int, Experience] = {}
    first = _batch(batches)
    assert first > 0, "expected to be worth it"
    assert sum(_batch(batches) for _ in range(3)) < 3 * first
    assert _batch({}) == first, "without that"
    assert batches[SLOTS].slowdowns.of(1) < 1.15, "what slows trees down is not the machine"


def test_plain_steps_at_first_show_what_those_take() -> None:
    timed, batches = batch_costs(COSTS, SLOTS), dict[int, Experience]()
    costs = StepCosts(1.5 * timed.plain, timed.verify, timed.first, timed.level, timed.wait)
    known = {"score_scale": 1.0, "fade": 0.1, "timed": timed, "seed": 3}
    ease = np.full(4 * TOKENS + LEVELS, 0.5)
    text = SimulatedText(Scenario(name="", ease=ease, costs=costs, **known))
    watched = Watched(JointPolicy(COSTS, lambda: SLOTS, batches))
    run_policy(text, watched, 0, 8)
    assert [step.plan for step in watched.steps[:4]] == [None] * 4
    assert batches[SLOTS].slowdowns.of(1) > 1.3


def test_another_number_of_texts_has_times_of_its_own() -> None:
    batches: dict[int, Experience] = {}
    _batch(batches)
    assert _batch(batches, SLOTS // 2, factor=1.0) > TOKENS // 10
    assert sorted(batches) == [SLOTS // 2, SLOTS]
    assert max(batches[SLOTS].slowdowns.factors) > 1.5
    assert max(batches[SLOTS // 2].slowdowns.factors) == pytest.approx(1.0, abs=0.1)


def test_texts_before_have_shown_what_drafts_are_worth_but_not_what_they_take() -> None:
    before = Experience([1, *SIZES])
    before.slowdowns.learn(8, 9.0)
    before.slowdowns.learn(8, 9.0)
    before.gains.mean = 0 * before.gains.mean
    batches: dict[int, Experience] = {}
    JointPolicy(COSTS, lambda: SLOTS, batches, before)
    assert max(batches[SLOTS].slowdowns.factors) == 1.0
    assert batches[SLOTS].gains.mean.max() == 0.0
    assert max(before.slowdowns.factors) > 2, "as it was"


def test_texts_that_end_soon_have_shown_what_their_steps_took() -> None:
    batches: dict[int, Experience] = {}
    slots = SLOTS
    joint = JointPolicy(COSTS, lambda: slots, batches)
    text = joint.of_text()
    seconds = 1.5 * batch_costs(COSTS, SLOTS).plain
    for _ in range(5):
        text.observe(Step(text.choose(None), 1, [0], seconds))
    slots = SLOTS // 2
    text.choose(None)
    assert batches[SLOTS].slowdowns.of(1) > 1.2
