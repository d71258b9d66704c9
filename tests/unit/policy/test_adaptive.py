"""The choice of a tree: what it is based on, and how it changes."""

from __future__ import annotations

import random
from itertools import pairwise
from math import log
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_redrafter.config import DraftPlan
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.policy.acceptance import AcceptanceStats
from mlx_redrafter.policy.adaptive import (
    CANDIDATES,
    DRAFT_EVERY,
    LENGTHS,
    LONGEST,
    PLAIN_EVERY,
    SHORTEST,
    SIZES,
    TRIAL,
    AdaptivePolicy,
)
from mlx_redrafter.policy.fixed import FixedPolicy
from mlx_redrafter.tree import Drafts

Costs = dict[DraftPlan | None, float]


def _costs(plain: float, per_node: float, per_level: float = 0.0) -> Costs:
    return {None: plain} | {
        plan: plain + per_node * plan.num_nodes + per_level * plan.shape.levels
        for plan in CANDIDATES
    }


def _tree(plan: DraftPlan, chance: float) -> Any:
    """Drafts that follow each other, each right with this probability, and some that never are."""
    depths = [*range(1, plan.shape.length), *[1] * plan.num_nodes]
    scores = [depth * log(chance) for depth in range(1, plan.shape.length)]
    num = plan.num_nodes - 1
    drafts = Drafts([*scores, *[-20.0] * num][:num], depths[:num])
    return SimpleNamespace(size=plan.num_nodes, read=lambda: drafts)


def _keep(auto: AdaptivePolicy, plan: DraftPlan, chance: float) -> DraftPlan:
    """The plan of what is verified of drafts of such probabilities."""
    return DraftPlan(plan.shape, auto.keep(plan, _tree(plan, chance)))


def _run(
    auto: AdaptivePolicy, steps: int, accepted: int, chance: float = 0.7, costs: Costs | None = None
) -> list[DraftPlan | None]:
    """What steps verify that accept up to so many drafts and have such probabilities."""
    plans = []
    for _ in range(steps):
        chosen = auto.choose(None)
        kept = None if chosen is None else _keep(auto, chosen, chance)
        plans.append(kept)
        count = 0 if kept is None else min(accepted, kept.shape.levels, _nodes(kept) - 1)
        auto.observe(Step(chosen, _nodes(kept), count, None if costs is None else costs[kept]))
    return plans


def _nodes(plan: DraftPlan | None) -> int:
    return 1 if plan is None else plan.num_nodes


def _length(plan: DraftPlan | None) -> int:
    return 1 if plan is None else plan.shape.length


def test_a_drafter_that_is_never_right_ends_in_plain_decoding() -> None:
    plans = _run(AdaptivePolicy(_costs(1.0, 0.05)), 400, 0)
    assert plans.index(None) < 2 * TRIAL
    # Verified nodes beyond one per step are what drafting in vain costs.
    wasted = sum(_nodes(plan) * 0.05 for plan in plans if plan is not None)
    assert wasted < 0.01 * 400
    assert any(plan is not None for plan in plans[200:]), "probes go on"


def test_a_drafter_that_is_always_right_gets_the_most_drafts() -> None:
    plans = _run(AdaptivePolicy(_costs(1.0, 0.02)), 100, 9, 0.99)
    assert {_length(plan) for plan in plans[50:]} == {LENGTHS[-1]}
    assert min(map(_nodes, plans[50:])) >= LENGTHS[-1]


def test_drafts_are_verified_where_their_probabilities_are_worth_the_time() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.2))
    _run(auto, 100, 2, 0.7)
    sizes = {chance: _nodes(_keep(auto, LONGEST, chance)) for chance in (0.1, 0.7, 0.99)}
    assert sizes[0.1] == 2 < sizes[0.7] < sizes[0.99] == 8


def test_levels_are_drafted_while_they_give_more_than_their_time() -> None:
    lengths = {
        (chance, per_level): _length(
            _run(AdaptivePolicy(_costs(1.0, 0.05, per_level)), 100, accepted, chance)[-1]
        )
        for chance, accepted in ((0.5, 1), (0.95, 9))
        for per_level in (0.001, 0.1)
    }
    assert lengths[0.5, 0.1] < lengths[0.5, 0.001] == LENGTHS[-1]
    assert lengths[0.95, 0.1] == lengths[0.95, 0.001] == LENGTHS[-1]


def test_longer_drafts_come_back_when_the_text_becomes_easy() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.05, 0.1))
    assert _length(_run(auto, 100, 1, 0.45)[-1]) == LENGTHS[0]
    assert _length(_run(auto, 100, 9, 0.95)[-1]) == LENGTHS[-1]


def test_drafts_of_a_drafter_that_boasts_are_trusted_less() -> None:
    honest, boastful = AdaptivePolicy(_costs(1.0, 0.2)), AdaptivePolicy(_costs(1.0, 0.2))
    _run(honest, 60, 2, 0.8)
    _run(boastful, 60, 1, 0.8)
    sizes = [_nodes(_keep(auto, LONGEST, 0.8)) for auto in (honest, boastful)]
    assert sizes[0] > sizes[1]


def test_drafting_comes_back_when_the_drafter_becomes_right() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.05))
    assert _run(auto, 100, 0)[-1] is None
    assert _run(auto, 2000, 5)[-1] is not None


def test_after_a_text_in_which_drafting_did_not_pay_it_is_tried_with_little() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.05))
    assert not _run(auto, 200, 0, 0.3)[-1]
    carried_over = auto.carried_over
    plans = _run(AdaptivePolicy(_costs(1.0, 0.05), carried_over), 256, 0, 0.3)
    assert _nodes(plans[0]) == SIZES[0]
    assert {_nodes(plan) for plan in plans} == {1, SIZES[0]}
    assert len(plans) - plans.count(None) < 5
    plans = _run(AdaptivePolicy(_costs(1.0, 0.05), carried_over), 256, 5)
    assert _nodes(plans[-1]) > 2


def test_probes_that_were_in_vain_become_rarer() -> None:
    plans = _run(AdaptivePolicy(_costs(1.0, 0.05)), 1000, 0)
    drafted = [n for n, plan in enumerate(plans) if plan is not None and n > 2 * TRIAL]
    between = [after - before for before, after in pairwise(drafted)]
    assert between[:3] == [2 * DRAFT_EVERY, 4 * DRAFT_EVERY, 8 * DRAFT_EVERY]
    assert set(between[3:]) == {8 * DRAFT_EVERY}


def test_a_text_goes_on_as_the_one_before_ended() -> None:
    costs = _costs(1.0, 0.02, 0.05)
    auto = AdaptivePolicy(costs)
    ended = _length(_run(auto, 60, 2, 0.7)[-1])
    assert LENGTHS[0] < ended < LENGTHS[-1]
    plans = _run(AdaptivePolicy(costs, auto.carried_over), 60, 2, 0.7)
    assert {_length(plan) for plan in plans} == {ended}
    plans = _run(AdaptivePolicy(_costs(1.0, 0.1), auto.carried_over), 60, 0)
    assert plans.count(None) > 40, "or gives drafting up"


def test_a_text_of_a_few_steps_teaches_nothing() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.05))
    _run(auto, TRIAL - 1, 5)
    assert auto.carried_over is None
    _run(auto, 1, 5)
    assert auto.carried_over is not None


def test_expensive_verifies_are_not_chosen() -> None:
    plans = _run(AdaptivePolicy(_costs(1.0, 0.7)), 100, 1)
    assert plans.count(None) > 80


def test_the_first_text_tries_what_seems_a_little_slower() -> None:
    slower = _costs(1.0, 0.0) | dict.fromkeys(CANDIDATES, 1.9)
    plans = _run(AdaptivePolicy(slower), 100, 3, 0.45)
    assert None not in plans, "more is accepted than was expected"
    plans = _run(AdaptivePolicy(slower), 100, 0, 0.45)
    assert plans.index(None) < TRIAL, "and not even that"


def test_sizes_follow_what_steps_take_now() -> None:
    timed, now = _costs(1.0, 0.02), _costs(1.0, 0.3)
    auto = AdaptivePolicy(timed)
    before = _run(auto, 100, 3, 0.8, timed)[-1]
    assert _nodes(before) >= 6
    after = _run(auto, 150, 3, 0.8, now)[-1]
    assert after is not None
    sizes = [
        _nodes(_keep(one, LONGEST, 0.6)) for one in (auto, AdaptivePolicy(timed, auto.carried_over))
    ]
    assert sizes[0] < sizes[1]


def test_plain_decoding_is_left_when_it_is_what_became_slow() -> None:
    timed = _costs(1.0, 0.7)
    auto = AdaptivePolicy(timed)
    assert _run(auto, 100, 1, 0.5, timed)[-1] is None
    assert _run(auto, 2000, 1, 0.5, _costs(8.0, 0.1))[-500:].count(None) < 250


def test_a_machine_twice_as_slow_changes_no_choice() -> None:
    timed = _costs(1.0, 0.1)
    slow = {plan: 2 * seconds for plan, seconds in timed.items()}
    sizes = [_nodes(_run(AdaptivePolicy(timed), 400, 2, 0.7, costs)[-1]) for costs in (timed, slow)]
    assert sizes[0] == sizes[1] > 2


def _decode(
    accepts: float, slowdown: float, seed: int, before: AcceptanceStats | None = None
) -> tuple[float, AdaptivePolicy]:
    """How fast a text of 256 tokens is, plain decoding being 1, and the policy.

    As when a text is decoded, a plan is chosen before the outcome of the step before it is known,
    and a plain step after a plain one is waited for with the one before.

    Args:
        accepts: Mean chance that a draft is right; the drafter knows each one's.
        slowdown: What 10 nodes cost more than when they were timed.
        seed: Of the chances and of the noise of the times.
        before: What the text before has carried_over.
    """
    rng = random.Random(seed)
    timed = _costs(1.0, 0.08)
    auto = AdaptivePolicy(timed, before)
    tokens, total = 0, 0.0

    def keep(chosen: DraftPlan | None) -> tuple[DraftPlan | None, float]:
        """What is verified, and the chance that a draft is right; drafts follow each other."""
        if chosen is None:
            return None, 0.0
        chance = min(0.999, max(0.001, accepts + rng.choice((-0.2, 0.2)))) if accepts else 0.3
        return _keep(auto, chosen, chance), chance if accepts else 0.0

    def draw(plan: DraftPlan | None) -> float:
        return (timed[plan] + slowdown * (_nodes(plan) - 1) / 10) * rng.lognormvariate(0, 0.05)

    chosen = auto.choose(None)
    plan, chance = keep(chosen)
    seconds = draw(plan)
    while tokens < 256:
        following, ahead = auto.choose(None), None
        if plan is following is None:
            seconds, ahead = seconds + draw(None), 0.0
        depth = 0 if plan is None else min(_nodes(plan), plan.shape.length) - 1
        count = next((n for n in range(depth) if rng.random() >= chance), depth)
        auto.observe(Step(chosen, _nodes(plan), count, seconds))
        tokens, total = tokens + count + 1, total + seconds
        chosen = following
        plan, chance = keep(chosen)
        seconds = draw(plan) if ahead is None else ahead
    return tokens / total, auto


@pytest.mark.parametrize("slowdown", [0.0, 1.0])
def test_a_useless_drafter_costs_next_to_nothing(slowdown: float) -> None:
    texts = [_decode(0.0, slowdown, seed) for seed in range(9)]
    # The probes that a text begins with are all that it costs.
    assert median(speed for speed, _ in texts) > 0.975
    after_another = [_decode(0.0, slowdown, seed, auto.carried_over)[0] for seed, (_, auto) in
                     enumerate(texts)]  # fmt: skip
    assert median(after_another) > 0.985


@pytest.mark.parametrize("slowdown", [0.0, 1.0])
def test_a_good_drafter_is_used_however_steps_overlap(slowdown: float) -> None:
    speeds = [_decode(0.8, slowdown, seed)[0] for seed in range(9)]
    assert median(speeds) > (2.0 if slowdown == 0 else 1.5)


def test_knowing_which_drafts_are_right_beats_every_fixed_chain() -> None:
    speeds = [_decode(0.6, 1.0, seed)[0] for seed in range(9)]
    fixed = [
        0.5 * sum(sum(chance**depth for depth in range(size)) for chance in (0.4, 0.8))
        / (1 + 0.08 * size + (size - 1) / 10)
        for size in SIZES
    ]  # fmt: skip
    assert median(speeds) > max(1.0, *fixed)


def test_only_steps_between_two_of_their_kind_are_timed() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.1))
    plans: list[DraftPlan | None] = [LONGEST, auto.choose(None)]
    for _ in range(300):
        chosen = plans[-1]
        kept = chosen and _keep(auto, chosen, 0.7)
        plans.append(auto.choose(None))
        before = dict(auto.seconds)
        auto.observe(Step(chosen, _nodes(kept), 1 if kept else 0, 2 * auto.seconds[kept]))
        is_inner = len({plan is None for plan in plans[-3:]}) == 1
        assert (dict(auto.seconds) != before) == is_inner
    assert None in plans


def test_plain_steps_are_timed_now_and_then_while_drafting() -> None:
    plans = _run(AdaptivePolicy(_costs(1.0, 0.02)), 400, 5, 0.9, _costs(1.0, 0.02))
    plain = [n for n, plan in enumerate(plans) if plan is None]
    assert len(plain) == 3 * (400 // PLAIN_EVERY)
    assert all(plans[n : n + 3] == [None] * 3 for n in plain[::3]), "the second of three is timed"


def test_plain_steps_teach_nothing_of_drafts() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.1))
    seconds = dict.fromkeys(SIZES, 1.0)
    before = [auto.acceptance.speed(length, seconds) for length in LENGTHS]
    auto.observe(Step(None, 1, 0, None))
    assert [auto.acceptance.speed(length, seconds) for length in LENGTHS] == before


def test_a_fixed_plan_stays_and_waits_for_nothing() -> None:
    fixed = FixedPolicy(SHORTEST)
    fixed.observe(Step(SHORTEST, SHORTEST.num_nodes, 0, None))
    assert fixed.choose(None) == SHORTEST
    tree: Any = SimpleNamespace(
        size=SHORTEST.num_nodes, read=lambda: pytest.fail("drafts were read")
    )
    assert fixed.keep(SHORTEST, tree) == SHORTEST.num_nodes


def test_choices_say_what_was_taken_and_what_it_gave() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.02))
    plans = _run(auto, 100, 5, 0.9)
    choices = auto.shapes()
    assert [choice.plan for choice in choices] == [
        plan for plan in (None, *CANDIDATES) if plan is None or plan in plans
    ]
    assert [choice.steps for choice in choices] == [plans.count(c.plan) for c in choices]
    assert {c.tokens / c.steps for c in choices if c.steps} == {
        min(5, _nodes(c.plan) - 1, _length(c.plan) - 1) + 1 for c in choices if c.steps
    }
