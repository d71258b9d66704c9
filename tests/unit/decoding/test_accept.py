"""The acceptance walk against a walk in plain Python."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.decoding.passes import accept
from mlx_redrafter.trees.tree import NO_TOKEN, TokenTree
from tests.helpers.drafts import make_tree
from tests.helpers.oracles import walk


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


def test_padding_is_never_accepted() -> None:
    tree = make_tree([5, NO_TOKEN, 7], [0, 0, 0], 1)
    path, _, bonus, *_ = accept(tree, mx.array([7, 1, 2]))
    assert np.array(path).tolist() == [0, 2]
    assert np.array(bonus).tolist() == [2]


def test_a_match_below_a_mismatch_does_not_count() -> None:
    tree = make_tree([5, 1, 2], [0, 0, 1], 2)
    _, num_accepted, bonus, *_ = accept(tree, mx.array([9, 2, 3]))
    assert np.array(num_accepted).tolist() == [0]
    assert np.array(bonus).tolist() == [9]


def test_tree_smaller_than_a_beam() -> None:
    path, num_accepted, bonus, *_ = accept(make_tree([3], [0], 4), mx.array([8]))
    assert path.shape == (5,)
    assert np.array(num_accepted).tolist() == [0]
    assert np.array(bonus).tolist() == [8]


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
