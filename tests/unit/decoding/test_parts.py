"""Small parts of decoding: acceptance, processors on trees, counts, and the clock of steps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.decoding import delivery
from mlx_redrafter.decoding.accept import accept
from mlx_redrafter.decoding.delivery import StepClock
from mlx_redrafter.decoding.processors import ProcessorChain
from mlx_redrafter.decoding.stats import DecodingStats, ShapeStats
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.trees.tree import NO_TOKEN, TokenTree
from tests.helpers.drafts import make_tree
from tests.helpers.oracles import walk


def test_each_node_sees_the_text_and_its_ancestors() -> None:
    seen: list[list[int]] = []

    def record(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(np.array(tokens).tolist())
        return logits + 1

    chain = ProcessorChain([record], [1, 2])
    chain.extend(mx.array([7], dtype=mx.int32))  # the root
    tree = make_tree([7, 8, 9, 8, NO_TOKEN], [0, 0, 1, 1, 0], 2)
    found = np.array(chain.process_tree(mx.zeros((5, 4)), tree))
    assert seen == [[1, 2, 7], [1, 2, 7, 8], [1, 2, 7, 8, 9], [1, 2, 7, 8, 8]]
    assert found[:4].min() == found[:4].max() == 1
    assert found[4].max() == 0  # padding keeps its own


def test_processors_run_in_order_and_may_write_in_place() -> None:
    def write(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, tokens] = 5.0
        return logits

    chain = ProcessorChain([write, lambda tokens, logits: logits * 2], [0])
    assert np.array(chain.process(mx.ones((1, 3)))).tolist() == [[10, 2, 2]]
    both = mx.ones((2, 3))
    tree = make_tree([0, 1], [0, 0], 1)
    assert np.array(chain.process_tree(both, tree)).tolist() == [[10, 2, 2], [10, 10, 2]]
    assert np.array(both).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_four_steps_that_accept_drafts() -> None:
    """They yield 3 + 1 + 3 + 2 tokens after the first."""
    stats = DecodingStats(num_tokens=10)
    for num_accepted in (2, 0, 2, 1):
        stats.count_step(num_accepted, num_verified=9, num_unmerged=17)
    assert stats.accepted_counts == [1, 1, 2]
    assert stats.steps == 4
    assert stats.tokens_per_step == pytest.approx(9 / 4)
    assert stats.acceptance_rate_by_depth == [0.75, 0.5]
    assert (stats.num_verified, stats.num_unmerged) == (36, 68)
    assert DecodingStats().accepted_counts == [], "requests do not share counts"


def test_a_kind_of_step_shows_what_was_found_and_expected() -> None:
    plan = DraftPlan(DraftShape(2, 6), 8)
    shown = str(ShapeStats(plan, 0.0061, 4, 10, 0.0052, 12.0))
    assert shown == "2x6:8, 4 steps: 2.50 (3.00) tokens, 6.1 (5.2) ms"
    assert str(ShapeStats(None, 0.004, 0, 0, 0.004, 0.0)).startswith("plain, 0 steps: 0.00 (0.00)")


def test_steps_last_from_outcome_to_outcome_unless_the_caller_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, clock = [0.0], StepClock()
    monkeypatch.setattr(delivery, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step(seconds: float, away: float = 0.0) -> float | None:
        clock.leave_out(away)
        now[0] += seconds
        return clock.lap()

    assert [step(seconds) for seconds in (1.0, 0.5, 2.0)] == [None, 0.5, 2.0]
    assert step(1.0, away=0.05) == 1.0
    assert step(1.0, away=0.5) is None
    assert step(1.0) == 1.0, "forgiven with the next step"


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    """Tokens, parents and choices of a tree with distinct siblings and padding, and L."""
    length = draw(st.integers(2, 6))
    tokens, parents, depths = [draw(st.integers(0, 3))], [0], [0]
    for _ in range(draw(st.integers(0, 14))):
        parent = draw(st.integers(0, len(tokens) - 1))
        taken = {t for t, p in zip(tokens[1:], parents[1:], strict=True) if p == parent}
        free = sorted(set(range(4)) - taken)
        if free and depths[parent] < length - 1:
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
            depths.append(depths[parent] + 1)
    padding = draw(st.integers(0, 3))
    tokens += [NO_TOKEN] * padding
    parents += [0] * padding
    chosen = draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens)))
    return tokens, parents, chosen, length


@given(trees())
def test_path_is_the_longest_match(case: tuple[list[int], list[int], list[int], int]) -> None:
    tokens, parents, chosen, length = case
    path, num_accepted, bonus, *_ = accept(make_tree(tokens, parents, length - 1), mx.array(chosen))
    expected = walk(tokens, parents, chosen)
    assert np.array(num_accepted).tolist() == [len(expected) - 1]
    assert path.shape == (length,)
    assert np.array(path).tolist()[: len(expected)] == expected
    assert np.array(bonus).tolist() == [chosen[expected[-1]]]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=8))
def test_a_chain_is_accepted_as_any_other_tree(nodes: list[tuple[int, int]]) -> None:
    tokens, chosen = zip(*nodes, strict=True)
    chain = TokenTree.of(tokens, [max(node - 1, 0) for node in range(len(tokens))])
    assert chain.is_chain
    choices = mx.array(chosen, dtype=mx.int32)
    found, expected = accept(chain, choices), accept(replace(chain, is_chain=False), choices)
    count = int(expected[1][0])
    assert int(found[1][0]) == count
    assert int(found[2][0]) == int(expected[2][0])
    assert np.array_equal(found[0][: count + 1], expected[0][: count + 1])
