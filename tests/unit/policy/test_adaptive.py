"""The choice of a tree: what it is based on, and how it changes."""

from __future__ import annotations

import random
from itertools import pairwise
from math import log
from statistics import median

import pytest

from mlx_redrafter.config import TreeShape
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
    Drafts,
    FixedPolicy,
)

Costs = dict[TreeShape | None, float]


def _costs(plain: float, per_node: float, per_level: float = 0.0) -> Costs:
    return {None: plain} | {
        shape: plain + per_node * (shape.tree_nodes or 0) + per_level * shape.draft_length
        for shape in CANDIDATES
    }


def _drafts(shape: TreeShape, chance: float) -> Drafts:
    """Drafts that follow each other, each right with this probability, and some that never are."""
    depths = [*range(1, shape.beam_length), *[1] * (shape.tree_nodes or 0)]
    scores = [depth * log(chance) for depth in range(1, shape.beam_length)]
    num = (shape.tree_nodes or 0) - 1
    return Drafts([*scores, *[-20.0] * num][:num], depths[:num])


def _run(
    auto: AdaptivePolicy, steps: int, accepted: int, chance: float = 0.7, costs: Costs | None = None
) -> list[TreeShape | None]:
    """The shapes of steps that accept up to so many drafts and have such probabilities."""
    shapes = []
    for _ in range(steps):
        way = auto.choose()
        shape = None if way is None else auto.cut(way, lambda way=way: _drafts(way, chance))
        shapes.append(shape)
        count = 0 if shape is None else min(accepted, shape.draft_length, _nodes(shape) - 1)
        auto.observe(shape, count, None if costs is None else costs[shape])
    return shapes


def _nodes(shape: TreeShape | None) -> int:
    return 1 if shape is None else shape.tree_nodes or 0


def _length(shape: TreeShape | None) -> int:
    return 1 if shape is None else shape.beam_length


def test_a_drafter_that_is_never_right_ends_in_plain_decoding() -> None:
    shapes = _run(AdaptivePolicy(_costs(1.0, 0.05)), 400, 0)
    assert shapes.index(None) < 2 * TRIAL
    # Verified nodes beyond one per step are what drafting in vain costs.
    wasted = sum(_nodes(shape) * 0.05 for shape in shapes if shape is not None)
    assert wasted < 0.01 * 400
    assert any(shape is not None for shape in shapes[200:]), "probes go on"


def test_a_drafter_that_is_always_right_gets_the_most_drafts() -> None:
    shapes = _run(AdaptivePolicy(_costs(1.0, 0.02)), 100, 9, 0.99)
    assert {_length(shape) for shape in shapes[50:]} == {LENGTHS[-1]}
    assert min(map(_nodes, shapes[50:])) >= LENGTHS[-1]


def test_drafts_are_verified_where_their_probabilities_are_worth_the_time() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.2))
    _run(auto, 100, 2, 0.7)
    sizes = {
        chance: _nodes(auto.cut(LONGEST, lambda chance=chance: _drafts(LONGEST, chance)))
        for chance in (0.1, 0.7, 0.99)
    }
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
    sizes = [
        _nodes(auto.cut(LONGEST, lambda: _drafts(LONGEST, 0.8))) for auto in (honest, boastful)
    ]
    assert sizes[0] > sizes[1]


def test_drafting_comes_back_when_the_drafter_becomes_right() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.05))
    assert _run(auto, 100, 0)[-1] is None
    assert _run(auto, 2000, 5)[-1] is not None


def test_after_a_text_in_which_drafting_did_not_pay_it_is_tried_with_little() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.05))
    assert not _run(auto, 200, 0, 0.3)[-1]
    carried_over = auto.carried_over
    shapes = _run(AdaptivePolicy(_costs(1.0, 0.05), carried_over), 256, 0, 0.3)
    assert _nodes(shapes[0]) == SIZES[0]
    assert {_nodes(shape) for shape in shapes} == {1, SIZES[0]}
    assert len(shapes) - shapes.count(None) < 5
    shapes = _run(AdaptivePolicy(_costs(1.0, 0.05), carried_over), 256, 5)
    assert _nodes(shapes[-1]) > 2


def test_probes_that_were_in_vain_become_rarer() -> None:
    shapes = _run(AdaptivePolicy(_costs(1.0, 0.05)), 1000, 0)
    drafted = [n for n, shape in enumerate(shapes) if shape is not None and n > 2 * TRIAL]
    between = [after - before for before, after in pairwise(drafted)]
    assert between[:3] == [2 * DRAFT_EVERY, 4 * DRAFT_EVERY, 8 * DRAFT_EVERY]
    assert set(between[3:]) == {8 * DRAFT_EVERY}


def test_a_text_goes_on_as_the_one_before_ended() -> None:
    costs = _costs(1.0, 0.02, 0.05)
    auto = AdaptivePolicy(costs)
    ended = _length(_run(auto, 60, 2, 0.7)[-1])
    assert LENGTHS[0] < ended < LENGTHS[-1]
    shapes = _run(AdaptivePolicy(costs, auto.carried_over), 60, 2, 0.7)
    assert {_length(shape) for shape in shapes} == {ended}
    shapes = _run(AdaptivePolicy(_costs(1.0, 0.1), auto.carried_over), 60, 0)
    assert shapes.count(None) > 40, "or gives drafting up"


def test_a_text_of_a_few_steps_teaches_nothing() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.05))
    _run(auto, TRIAL - 1, 5)
    assert auto.carried_over is None
    _run(auto, 1, 5)
    assert auto.carried_over is not None


def test_expensive_verifies_are_not_chosen() -> None:
    shapes = _run(AdaptivePolicy(_costs(1.0, 0.7)), 100, 1)
    assert shapes.count(None) > 80


def test_the_first_text_tries_what_seems_a_little_slower() -> None:
    slower = _costs(1.0, 0.0) | dict.fromkeys(CANDIDATES, 1.9)
    shapes = _run(AdaptivePolicy(slower), 100, 3, 0.45)
    assert None not in shapes, "more is accepted than was expected"
    shapes = _run(AdaptivePolicy(slower), 100, 0, 0.45)
    assert shapes.index(None) < TRIAL, "and not even that"


def test_sizes_follow_what_steps_take_now() -> None:
    timed, now = _costs(1.0, 0.02), _costs(1.0, 0.3)
    auto = AdaptivePolicy(timed)
    before = _run(auto, 100, 3, 0.8, timed)[-1]
    assert _nodes(before) >= 6
    after = _run(auto, 150, 3, 0.8, now)[-1]
    assert after is not None
    sizes = [
        _nodes(one.cut(LONGEST, lambda: _drafts(LONGEST, 0.6)))
        for one in (auto, AdaptivePolicy(timed, auto.carried_over))
    ]
    assert sizes[0] < sizes[1]


def test_plain_decoding_is_left_when_it_is_what_became_slow() -> None:
    timed = _costs(1.0, 0.7)
    auto = AdaptivePolicy(timed)
    assert _run(auto, 100, 1, 0.5, timed)[-1] is None
    assert _run(auto, 2000, 1, 0.5, _costs(8.0, 0.1))[-500:].count(None) < 250


def test_a_machine_twice_as_slow_changes_no_choice() -> None:
    timed = _costs(1.0, 0.1)
    slow = {shape: 2 * seconds for shape, seconds in timed.items()}
    sizes = [_nodes(_run(AdaptivePolicy(timed), 400, 2, 0.7, costs)[-1]) for costs in (timed, slow)]
    assert sizes[0] == sizes[1] > 2


def _decode(
    accepts: float, slowdown: float, seed: int, before: AcceptanceStats | None = None
) -> tuple[float, AdaptivePolicy]:
    """How fast a text of 256 tokens is, plain decoding being 1, and the controller.

    As with a decoder, the way of drafting is chosen before the outcome of the step before it is
    known, and a plain step after a plain one is waited for with the one before.

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

    def cut(way: TreeShape | None) -> tuple[TreeShape | None, float]:
        """The shape, and the chance that a draft is right; drafts follow each other."""
        if way is None:
            return None, 0.0
        chance = min(0.999, max(0.001, accepts + rng.choice((-0.2, 0.2)))) if accepts else 0.3
        return auto.cut(way, lambda: _drafts(way, chance)), chance if accepts else 0.0

    def draw(shape: TreeShape | None) -> float:
        return (timed[shape] + slowdown * (_nodes(shape) - 1) / 10) * rng.lognormvariate(0, 0.05)

    shape, chance = cut(auto.choose())
    seconds = draw(shape)
    while tokens < 256:
        following, ahead = auto.choose(), None
        if shape is following is None:
            seconds, ahead = seconds + draw(None), 0.0
        depth = 0 if shape is None else min(_nodes(shape), shape.beam_length) - 1
        count = next((n for n in range(depth) if rng.random() >= chance), depth)
        auto.observe(shape, count, seconds)
        tokens, total = tokens + count + 1, total + seconds
        shape, chance = cut(following)
        seconds = draw(shape) if ahead is None else ahead
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
    ways: list[TreeShape | None] = [LONGEST, auto.choose()]
    for _ in range(300):
        way = ways[-1]
        shape = way and auto.cut(way, lambda way=way: _drafts(way, 0.7))
        ways.append(auto.choose())
        before = dict(auto.seconds)
        auto.observe(shape, 1 if shape else 0, 2 * auto.seconds[shape])
        is_inner = len({way is None for way in ways[-3:]}) == 1
        assert (dict(auto.seconds) != before) == is_inner
    assert None in ways


def test_plain_steps_are_timed_now_and_then_while_drafting() -> None:
    shapes = _run(AdaptivePolicy(_costs(1.0, 0.02)), 400, 5, 0.9, _costs(1.0, 0.02))
    plain = [n for n, shape in enumerate(shapes) if shape is None]
    assert len(plain) == 3 * (400 // PLAIN_EVERY)
    assert all(shapes[n : n + 3] == [None] * 3 for n in plain[::3]), "the second of three is timed"


def test_plain_steps_teach_nothing_of_drafts() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.1))
    seconds = dict.fromkeys(SIZES, 1.0)
    before = [auto.experience.speed(length, seconds) for length in LENGTHS]
    auto.observe(None, 0, None)
    assert [auto.experience.speed(length, seconds) for length in LENGTHS] == before


def test_a_fixed_shape_stays_and_waits_for_nothing() -> None:
    fixed = FixedPolicy(SHORTEST)
    fixed.observe(SHORTEST, 0, None)
    assert fixed.choose() == SHORTEST
    assert fixed.cut(SHORTEST, lambda: pytest.fail("drafts were read")) == SHORTEST


def test_choices_say_what_was_taken_and_what_it_gave() -> None:
    auto = AdaptivePolicy(_costs(1.0, 0.02))
    shapes = _run(auto, 100, 5, 0.9)
    choices = auto.choices()
    assert [choice.shape for choice in choices] == [
        shape for shape in (None, *CANDIDATES) if shape is None or shape in shapes
    ]
    assert [choice.steps for choice in choices] == [shapes.count(c.shape) for c in choices]
    assert {c.tokens / c.steps for c in choices if c.steps} == {
        min(5, _nodes(c.shape) - 1, _length(c.shape) - 1) + 1 for c in choices if c.steps
    }
