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
    Accepted,
    AutoShape,
    FixedShape,
    contains,
)

NOTHING = Accepted([], [])
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


def test_largest_shape_contains_every_candidate() -> None:
    assert all(contains(LARGEST, shape) for shape in CANDIDATES)
    assert not contains(CHAIN, LARGEST)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (TreeShape(4, 6, 16), 4),
        (TreeShape(4, 3, 16), 2),  # too short for the rest
        (TreeShape(4, 6, 10), 3),  # the fourth draft has rank 12
        (TreeShape(4, 6, 6), 2),  # the third has rank 7
        (TreeShape(1, 6, 6), 1),  # the second is no first child
        (TreeShape(2, 6, 16), 2),  # the third is a third child
    ],
)
def test_counting_what_a_smaller_tree_would_have_accepted(shape: TreeShape, expected: int) -> None:
    accepted = Accepted(ranks=[0, 2, 7, 12], children=[0, 1, 2, 0])
    assert accepted.count_within(shape) == expected


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
    always = Accepted(ranks=[0, 1, 2, 3, 4], children=[0, 0, 0, 0, 0])
    shapes = _run(AutoShape(_costs(1.0, 0.02)), 100, always)
    assert shapes[-1] is not None
    assert shapes[-1].beam_length == LARGEST.beam_length


def test_drafting_comes_back_when_the_drafter_becomes_right() -> None:
    auto = AutoShape(_costs(1.0, 0.05))
    assert _run(auto, 100, NOTHING)[-1] is None
    always = Accepted(ranks=[0, 1, 2, 3, 4], children=[0, 0, 0, 0, 0])
    assert _run(auto, 2000, always)[-1] is not None


def test_after_a_text_in_which_drafting_did_not_pay_it_is_tried_with_little() -> None:
    auto = AutoShape(_costs(1.0, 0.05))
    assert auto.pays
    assert not _run(auto, 200, NOTHING)[-1]
    assert not auto.pays
    auto = AutoShape(_costs(1.0, 0.05), did_pay=auto.pays)
    shapes = _run(auto, 256, NOTHING)
    assert shapes[0] == SMALL
    assert set(shapes) == {SMALL, None}
    assert shapes.count(SMALL) < 5
    assert not auto.pays
    always = Accepted(ranks=[0, 1, 2, 3, 4], children=[0, 0, 0, 0, 0])
    auto = AutoShape(_costs(1.0, 0.05), did_pay=False)
    shapes = _run(auto, 256, always)
    assert shapes.index(LARGEST) < 50
    assert auto.pays


@pytest.mark.parametrize("did_pay", [True, False])
def test_a_short_text_does_not_say_whether_drafting_pays(did_pay: bool) -> None:
    auto = AutoShape(_costs(1.0, 0.05), did_pay)
    assert auto.pays == did_pay
    _run(auto, 20, NOTHING)
    assert auto.pays == did_pay


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
    always = Accepted(ranks=[0, 1, 2, 3, 4], children=[0, 1, 1, 0, 1])
    timed, now = _costs(1.0, 0.05), _costs(1.0, 0.4)

    def speed(shape: TreeShape | None) -> float:
        return (1 if shape is None else 1 + always.count_within(shape)) / now[shape]

    auto = AutoShape(timed)
    before = _run(auto, 100, always, timed)[-1]
    after = _run(auto, 150, always, now)[-1]
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


def _decode(accepts: float, slowdown: float, seed: int, did_pay: bool = True) -> float:
    """How fast a text of 256 tokens is, plain decoding being 1.

    As with a decoder, a shape is chosen before the outcome of the step before it is known, and a
    plain step after a plain one is waited for with the one before.

    Args:
        accepts: Chance that a draft is right, always the first of its siblings.
        slowdown: What 10 nodes cost more than when they were timed.
        seed: Of the noise of the times.
        did_pay: Whether drafting did in the text before.
    """
    rng = random.Random(seed)
    timed = _costs(1.0, 0.08)
    auto = AutoShape(timed, did_pay)
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
    after_another = [_decode(0.0, slowdown, seed, did_pay=False) for seed in range(9)]
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
    always = Accepted(ranks=[0, 1, 2, 3, 4], children=[0, 0, 0, 0, 0])
    shapes = _run(AutoShape(_costs(1.0, 0.02)), 400, always, _costs(1.0, 0.02))
    plain = [n for n, shape in enumerate(shapes) if shape is None]
    assert 3 <= len(plain) < 0.03 * 400
    assert all(shapes[n : n + 3] == [None] * 3 for n in plain[::3]), "the second of three is timed"


def test_a_fixed_shape_stays() -> None:
    fixed = FixedShape(CHAIN)
    fixed.observe(CHAIN, NOTHING, None)
    assert fixed.choose() == CHAIN


def test_choices_say_what_was_taken_and_why() -> None:
    auto = AutoShape(_costs(1.0, 0.02))
    always = Accepted(ranks=[0, 1, 2, 3, 4], children=[0, 0, 0, 0, 0])
    shapes = _run(auto, 100, always)
    choices = auto.choices()
    assert {choice.shape for choice in choices} == {None, *CANDIDATES}
    assert sum(choice.steps for choice in choices) == 100
    assert choices[0].shape == shapes[-1]
    assert choices[0].tokens == pytest.approx(6, abs=0.5)
    speeds = [choice.tokens_per_second for choice in choices]
    assert speeds == sorted(speeds, reverse=True)
