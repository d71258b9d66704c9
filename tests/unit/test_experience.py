"""What drafting has been worth: means that follow, and how far probabilities are trusted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_redrafter.config import TreeShape
from mlx_redrafter.controller import CHAIN, TREE
from mlx_redrafter.experience import (
    GUESSED_DRAFTS,
    MEMORY,
    MOST_TRUST,
    REMEMBERED,
    Experience,
)

SHORT = replace(CHAIN, tree_nodes=2)
GUESSES = {CHAIN: SHORT, TREE: replace(TREE, tree_nodes=4)}
SECONDS = {None: 0.5, SHORT: 0.6, CHAIN: 1.0, GUESSES[TREE]: 0.8}


def _learnt(steps: int, accepted: int, expected: float, shape: TreeShape = CHAIN) -> Experience:
    experience = Experience(GUESSES)
    for _ in range(steps):
        experience.learn(CHAIN, shape, accepted, expected)
    return experience


def test_a_plain_step_gives_one_token_in_its_time() -> None:
    assert _learnt(5, 3, 3.0).speed(None, SECONDS) == 1 / SECONDS[None]


def test_what_is_expected_becomes_what_was_seen() -> None:
    new, experience = Experience(GUESSES), _learnt(4 * MEMORY, 3, 3.0)
    assert experience.speed(CHAIN, SECONDS) == pytest.approx(4 / SECONDS[CHAIN], rel=0.05)
    assert experience.speed(TREE, SECONDS) == new.speed(TREE, SECONDS), "which was not tried"


def test_a_way_that_was_not_tried_is_trusted_no_more_than_others() -> None:
    new, experience = Experience(GUESSES), _learnt(4 * MEMORY, 0, 3.0)
    assert experience.speed(TREE, SECONDS) < new.speed(TREE, SECONDS)
    assert experience.speed(TREE, SECONDS) == pytest.approx(1 / SECONDS[GUESSES[TREE]], rel=0.02)


def test_the_first_step_counts_as_much_as_the_guess() -> None:
    experience = _learnt(1, 2, 2.0)
    assert experience.trust == 1
    assert experience.speed(CHAIN, SECONDS) == pytest.approx(
        (1 + (GUESSED_DRAFTS + 2) / 2) / ((SECONDS[SHORT] + SECONDS[CHAIN]) / 2)
    )


def test_speeds_are_of_what_steps_take_now() -> None:
    experience = _learnt(4 * MEMORY, 3, 3.0)
    speed = experience.speed(CHAIN, SECONDS)
    assert experience.speed(CHAIN, SECONDS | {CHAIN: 2.0}) == pytest.approx(speed / 2, rel=0.02)


@pytest.mark.parametrize(
    ("accepted", "trust"), [(2, 1.0), (1, 0.5), (0, 0.0), (4, 2.0), (9, MOST_TRUST)]
)
def test_probabilities_are_trusted_as_far_as_they_come_true(accepted: int, trust: float) -> None:
    assert Experience(GUESSES).trust == 1
    assert _learnt(4 * MEMORY, accepted, 2.0).trust == pytest.approx(trust, abs=0.02)


def test_another_text_begins_with_what_this_one_taught_and_changes_its_mind_sooner() -> None:
    before = _learnt(4 * MEMORY, 3, 3.0)
    known = before.speed(CHAIN, SECONDS), before.trust
    after = Experience(GUESSES, before)
    assert (after.speed(CHAIN, SECONDS), after.trust) == pytest.approx(known)
    after.learn(CHAIN, SHORT, 0, 3.0)
    assert after.trust < 0.7
    share = 1 / (REMEMBERED + 1)
    assert after.speed(CHAIN, SECONDS) == pytest.approx(
        (1 + 3 * after.trust) / (share * SECONDS[SHORT] + (1 - share) * SECONDS[CHAIN]), rel=0.02
    )
    assert (before.speed(CHAIN, SECONDS), before.trust) == known, "and leaves the other as it was"
