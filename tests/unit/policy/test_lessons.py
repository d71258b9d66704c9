"""What is learnt from the times of steps."""

from __future__ import annotations

from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.policy.candidates import FITS, LOOKUP, SIZES
from mlx_redrafter.policy.experience import Experience
from mlx_redrafter.policy.lessons import Taken, learn_time, together
from mlx_redrafter.policy.prices import Prices
from mlx_redrafter.policy.step_costs import StepCosts

COSTS = StepCosts(1.0, {size: 1.0 + 0.1 * size for size in SIZES}, {1: 0.0}, {1: 0.1}, wait=0.1)


def _learn(step: Step, is_inner: bool = True, num_steps: int = 1) -> Experience:
    experience = Experience([1, *COSTS.verify])
    for _ in range(3):
        learn_time(Taken(step, is_inner, False, num_steps), COSTS, Prices(COSTS, FITS), experience)
    return experience


def test_a_lookup_that_finds_nothing_shows_what_waiting_for_it_took() -> None:
    found = _learn(Step(LOOKUP, 1, [5], 2.2), is_inner=False)
    assert found.lookups.of(1) > 1.3
    assert found.slowdowns.of(1) == 1.0
    assert _learn(Step(LOOKUP, 1, [5], 1.1), is_inner=False).lookups.of(1) == 1.0


def test_plain_steps_are_the_typical_one_of_them_with_the_tokens_of_all() -> None:
    steps = [Step(None, 1, [token], seconds) for token, seconds in enumerate([1.2, 9.0, None, 1.1])]
    assert together(steps) == Step(None, 1, [0, 1, 2, 3], 1.2)
    assert together(steps[2:3]).seconds is None


def test_one_of_two_kinds_of_steps_is_no_measure_of_plain_ones() -> None:
    assert _learn(Step(None, 1, [5], 2.0), is_inner=False).slowdowns.of(1) == 1.0
    assert _learn(Step(None, 1, [5], 2.0)).slowdowns.of(1) > 1.3
    assert _learn(Step(None, 1, [5], 2.0), num_steps=7).slowdowns.of(1) > 1.6
