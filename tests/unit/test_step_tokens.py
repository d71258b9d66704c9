"""What a step yields: counting what smaller trees would have accepted, and remembering it."""

from __future__ import annotations

import pytest

from mlx_redrafter.config import TreeShape
from mlx_redrafter.controller import CANDIDATES, LARGEST
from mlx_redrafter.step_tokens import MEMORY, REMEMBERED_STEPS, Accepted, StepTokens, contains

NOTHING = Accepted([], [])
CHAIN = CANDIDATES[0]


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


def test_a_step_teaches_of_the_shapes_that_it_contains() -> None:
    tokens = StepTokens(CANDIDATES)
    before = dict(tokens)
    tokens.learn(LARGEST, NOTHING)
    assert {shape for shape in tokens if tokens[shape] == before[shape]} == {None}
    before = dict(tokens)
    tokens.learn(CHAIN, Accepted([0], [0]))
    assert {shape for shape in tokens if tokens[shape] != before[shape]} == {CHAIN}
    assert tokens[None] == 1


def test_what_is_expected_becomes_what_was_seen() -> None:
    tokens = StepTokens(CANDIDATES)
    for _ in range(4 * MEMORY):
        tokens.learn(LARGEST, Accepted([0, 3], [0, 1]))
    assert tokens[LARGEST] == pytest.approx(3, abs=0.1)
    assert tokens[CHAIN] == pytest.approx(2, abs=0.1)


def test_another_text_begins_with_what_this_one_taught_and_changes_its_mind_sooner() -> None:
    before = StepTokens(CANDIDATES)
    for _ in range(MEMORY):
        before.learn(LARGEST, Accepted([0, 1, 2], [0, 0, 0]))
    after = StepTokens(CANDIDATES, before)
    assert dict(after) == dict(before)
    after.learn(LARGEST, NOTHING)
    assert after[LARGEST] == pytest.approx(before[LARGEST] - 3 / (REMEMBERED_STEPS + 1), abs=0.1)
    assert before[LARGEST] == pytest.approx(4, abs=0.1), "and leaves the other as it was"
