"""The choice of a shape: what it is based on, and how it changes."""

from __future__ import annotations

import random
from statistics import median

import pytest

from mlx_redrafter.config import TreeShape
from mlx_redrafter.controller import (
    CANDIDATES,
    FIRST_PROBES,
    FRUITLESS_PROBE,
    LARGEST,
    SMALL,
    AutoShape,
    FixedShape,
)
from mlx_redrafter.step_tokens import Accepted, StepTokens

NOTHING = Accepted([], [])
ALWAYS = Accepted(ranks=[0, 1, 2, 3, 4], children=[0, 0, 0, 0, 0])
CHAIN = CANDIDATES[0]


def _costs(plain: float, per_node: float) -> dict[TreeShape | None, float]:
    return {None: plain} | {
        shape: plain + per_node * (shape.tree_nodes or 0) for shape in CANDIDATES
    }


def _run(
    auto: AutoShape,
    steps: int,
    outcome: Accepted,
    seconds: dict[TreeShape | None, float] | None = None,
) -> list[TreeShape | None]:
    shapes = []
    for _ in range(steps):
        shape = auto.choose()
        shapes.append(shape)
        took = None if seconds is None else seconds[shape]
        auto.observe(shape, NOTHING if shape is None else outcome, took)
    return shapes


def test_a_drafter_that_is_never_right_ends_in_plain_decoding() -> None:
    shapes = _run(AutoShape(_costs(1.0, 0.05)), 400, NOTHING)
    assert shapes.index(None) < 12
    assert shapes[: FIRST_PROBES // FRUITLESS_PROBE] == [LARGEST] * (
        FIRST_PROBES // FRUITLESS_PROBE
    )
    assert shapes[FIRST_PROBES // FRUITLESS_PROBE] != LARGEST
    drafted = [shape for shape in shapes if shape is not None]
    # Verified nodes beyond one per step are what drafting in vain costs.
    wasted = sum((shape.tree_nodes or 0) * 0.05 for shape in drafted)
    assert wasted < 0.02 * 400
    assert any(shape is not None for shape in shapes[200:]), "probes go on"


def test_a_drafter_that_is_always_right_gets_the_longest_drafts() -> None:
    shapes = _run(AutoShape(_costs(1.0, 0.02)), 100, ALWAYS)
    assert shapes[-1] is not None
    assert shapes[-1].beam_length == LARGEST.beam_length


def test_drafting_comes_back_when_the_drafter_becomes_right() -> None:
    auto = AutoShape(_costs(1.0, 0.05))
    assert _run(auto, 100, NOTHING)[-1] is None
    assert _run(auto, 2000, ALWAYS)[-1] is not None


def test_after_a_text_in_which_drafting_did_not_pay_it_is_tried_with_little() -> None:
    auto = AutoShape(_costs(1.0, 0.05))
    assert not _run(auto, 200, NOTHING)[-1]
    auto = AutoShape(_costs(1.0, 0.05), auto.taught)
    shapes = _run(auto, 256, NOTHING)
    assert shapes[0] == SMALL
    assert set(shapes) == {SMALL, None}
    assert shapes.count(SMALL) < 5
    shapes = _run(AutoShape(_costs(1.0, 0.05), auto.taught), 256, ALWAYS)
    assert shapes.index(LARGEST) < 50


def test_a_text_goes_on_with_the_shape_that_was_best_in_the_one_before() -> None:
    auto = AutoShape(_costs(1.0, 0.02))
    right_once = Accepted(ranks=[0], children=[0])
    assert _run(auto, 60, right_once)[-1] == CHAIN
    shapes = _run(AutoShape(_costs(1.0, 0.02), auto.taught), 60, right_once)
    assert shapes.count(CHAIN) == 59, "and one probe"
    shapes = _run(AutoShape(_costs(1.0, 0.02), auto.taught), 60, ALWAYS)
    assert shapes[0] == CHAIN
    assert (shapes[-1] or CHAIN).beam_length >= 5
    shapes = _run(AutoShape(_costs(1.0, 0.1), auto.taught), 60, NOTHING)
    assert shapes[-1] is None, "which is given up when it no longer pays"


def test_a_text_of_a_few_steps_teaches_nothing() -> None:
    auto = AutoShape(_costs(1.0, 0.05))
    _run(auto, FIRST_PROBES - 1, ALWAYS)
    assert auto.taught is None
    _run(auto, 1, ALWAYS)
    assert auto.taught is not None


def test_expensive_verifies_are_not_chosen() -> None:
    right_once = Accepted(ranks=[0], children=[0])
    shapes = _run(AutoShape(_costs(1.0, 0.7)), 100, right_once)
    assert shapes[FIRST_PROBES:].count(None) > 80


def test_a_text_begins_with_steps_that_show_what_every_shape_is_worth() -> None:
    right_once = Accepted(ranks=[0], children=[0])
    shapes = _run(AutoShape(_costs(1.0, 0.02)), 60, right_once)
    assert shapes[:FIRST_PROBES] == [LARGEST] * FIRST_PROBES
    assert shapes[FIRST_PROBES] != LARGEST
    assert shapes[-1] == CHAIN, "one draft is all that is ever accepted"


def test_plain_steps_teach_nothing() -> None:
    auto = AutoShape(_costs(1.0, 0.1))
    before = dict(auto.tokens)
    auto.observe(None, NOTHING, None)
    assert auto.tokens == before


def test_the_shape_follows_what_steps_take_now() -> None:
    siblings = Accepted(ranks=[0, 1, 2, 3, 4], children=[0, 1, 1, 0, 1])
    timed, now = _costs(1.0, 0.05), _costs(1.0, 0.4)

    def speed(shape: TreeShape | None) -> float:
        return (1 if shape is None else 1 + siblings.count_within(shape)) / now[shape]

    auto = AutoShape(timed)
    before = _run(auto, 100, siblings, timed)[-1]
    after = _run(auto, 150, siblings, now)[-1]
    assert speed(before) < 0.9 * max(map(speed, now))
    assert speed(after) > 0.97 * max(map(speed, now))


def test_plain_decoding_is_left_when_it_is_what_became_slow() -> None:
    right_once = Accepted(ranks=[0], children=[0])
    timed = _costs(1.0, 0.7)
    auto = AutoShape(timed)
    assert _run(auto, 100, right_once, timed)[-1] is None
    assert _run(auto, 400, right_once, _costs(8.0, 0.1))[-1] is not None


def test_a_machine_twice_as_slow_changes_no_choice() -> None:
    right_once = Accepted(ranks=[0], children=[0])
    timed = _costs(1.0, 0.1)
    slow = {shape: 2 * seconds for shape, seconds in timed.items()}
    assert _run(AutoShape(timed), 150, right_once, slow)[-1] == CHAIN


def _decode(accepts: float, slowdown: float, seed: int, before: StepTokens | None = None) -> float:
    """How fast a text of 256 tokens is, plain decoding being 1.

    As with a decoder, a shape is chosen before the outcome of the step before it is known, and a
    plain step after a plain one is waited for with the one before.

    Args:
        accepts: Chance that a draft is right, always the first of its siblings.
        slowdown: What 10 nodes cost more than when they were timed.
        seed: Of the noise of the times.
        before: What the text before has taught.
    """
    rng = random.Random(seed)
    timed = _costs(1.0, 0.08)
    auto = AutoShape(timed, before)
    tokens, total = 0, 0.0

    def draw(shape: TreeShape | None) -> float:
        nodes = 1 if shape is None else (shape.tree_nodes or 0)
        return (timed[shape] + slowdown * (nodes - 1) / 10) * rng.lognormvariate(0, 0.05)

    shape = auto.choose()
    seconds = draw(shape)
    while tokens < 256:
        following = auto.choose()
        ahead = draw(following)
        if shape is following is None:
            seconds, ahead = seconds + ahead, 0.0
        depth = 0 if shape is None else shape.draft_length
        count = next((n for n in range(depth) if rng.random() >= accepts), depth)
        # Two siblings a draft, so that trees hold fewer right ones than chains of their size.
        accepted = Accepted([2 * n for n in range(count)], [0] * count)
        kept = 0 if shape is None else accepted.count_within(shape)
        auto.observe(shape, Accepted(accepted.ranks[:kept], [0] * kept), seconds)
        tokens, total = tokens + kept + 1, total + seconds
        shape, seconds = following, ahead
    return tokens / total


@pytest.mark.parametrize("slowdown", [0.0, 1.0])
def test_a_useless_drafter_costs_next_to_nothing(slowdown: float) -> None:
    speeds = [_decode(0.0, slowdown, seed) for seed in range(9)]
    # The probes that a text begins with are all that it costs.
    assert median(speeds) > (0.97 if slowdown == 0 else 0.95)
    before = AutoShape(_costs(1.0, 0.08))
    _run(before, 100, NOTHING)
    after_another = [_decode(0.0, slowdown, seed, before.taught) for seed in range(9)]
    assert median(after_another) > 0.985


@pytest.mark.parametrize("slowdown", [0.0, 1.0])
def test_a_good_drafter_is_used_however_steps_overlap(slowdown: float) -> None:
    speeds = [_decode(0.8, slowdown, seed) for seed in range(9)]
    assert median(speeds) > (2.0 if slowdown == 0 else 1.5)


def test_only_steps_between_two_of_their_shape_are_timed() -> None:
    auto = AutoShape(_costs(1.0, 0.1))
    right_once = Accepted(ranks=[0], children=[0])
    shapes = [LARGEST, auto.choose()]
    for _ in range(200):
        shapes.append(auto.choose())
        before, (last, shape, following) = dict(auto.seconds), shapes[-3:]
        auto.observe(shape, right_once if shape else NOTHING, 2 * auto.seconds[shape])
        assert (dict(auto.seconds) != before) == (last == shape == following)
    assert {None, CHAIN, LARGEST} <= set(shapes)


def test_plain_steps_are_timed_now_and_then_while_drafting() -> None:
    shapes = _run(AutoShape(_costs(1.0, 0.02)), 400, ALWAYS, _costs(1.0, 0.02))
    plain = [n for n, shape in enumerate(shapes) if shape is None]
    assert 3 <= len(plain) < 0.03 * 400
    assert all(shapes[n : n + 3] == [None] * 3 for n in plain[::3]), "the second of three is timed"


def test_a_fixed_shape_stays() -> None:
    fixed = FixedShape(CHAIN)
    fixed.observe(CHAIN, NOTHING, None)
    assert fixed.choose() == CHAIN


def test_choices_say_what_was_taken_and_why() -> None:
    auto = AutoShape(_costs(1.0, 0.02))
    shapes = _run(auto, 100, ALWAYS)
    choices = auto.choices()
    assert {choice.shape for choice in choices} == {None, *CANDIDATES}
    assert sum(choice.steps for choice in choices) == 100
    assert choices[0].shape == shapes[-1]
    assert choices[0].tokens == pytest.approx(6, abs=0.5)
    speeds = [choice.tokens_per_second for choice in choices]
    assert speeds == sorted(speeds, reverse=True)
