"""Token trees: the ancestor mask, padding and static sizes."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.proposers.search import Expansion, build_tree, merge_beams
from mlx_redrafter.trees.tree import NO_TOKEN, TokenTree, ancestor_mask
from tests.helpers.drafts import scored
from tests.helpers.models import random_drafter
from tests.helpers.oracles import ancestors, tree_paths
from tests.helpers.recurrent_search import expand


@given(st.lists(st.integers(0, 10**6), max_size=40))
def test_ancestor_mask_marks_every_node_above(draws: list[int]) -> None:
    parents = [0, *(draw % (n + 1) for n, draw in enumerate(draws))]
    found = ancestor_mask(mx.array(parents, dtype=mx.int32), len(parents))
    assert np.array_equal(np.array(found), ancestors(parents))


def _worked_example() -> Expansion:
    """Beams 1-4-6 and 1-5-7 of the root 9, width 2, length 4; 2 was a dead end."""
    return Expansion(
        tokens=mx.array([1, 2, 3, 4, 5, 8, 6, 7, 1], dtype=mx.int32),
        scores=mx.array([-1.0, -3.0, -4.0, -1.5, -1.6, -5.0, -1.7, -1.8, -8.0]),
        parents=mx.array([-1, -1, -1, 0, 0, 1, 3, 4, 3], dtype=mx.int32),
    )


def test_beams_are_merged() -> None:
    shape = DraftShape(2, 4, "beam")
    tree = merge_beams(_worked_example(), mx.array([9]), shape)
    assert tree_paths(tree) == [(9,), (9, 1), (9, 1, 4), (9, 1, 5), (9, 1, 4, 6), (9, 1, 5, 7)]
    assert tree.num_nodes == 6
    assert tree.num_unmerged == 7
    assert tree.tokens.shape == (6,)


def test_of_equal_scores_the_parent_comes_first() -> None:
    # A certain continuation costs nothing, so that child and parent tie.
    expansion = Expansion(
        tokens=mx.array([1, 2, 3, 4, 5, 6], dtype=mx.int32),
        scores=mx.array([-0.5, -0.5, -0.5, -0.5, -0.5, -0.5]),
        parents=mx.array([-1, -1, -1, 0, 0, 1], dtype=mx.int32),
    )
    for nodes in range(2, 8):
        tree = build_tree(expansion, mx.array([9]), DraftPlan.of(2, 3, nodes))
        assert len(tree_paths(tree)) == nodes  # checks that every parent is there


@given(st.integers(2, 16), st.data())
def test_a_chain_is_what_the_best_nodes_and_the_one_beam_are(
    length: int, data: st.DataObject
) -> None:
    drafted = length - 1
    losses = data.draw(st.lists(st.floats(0, 5, width=32), min_size=drafted, max_size=drafted))
    expansion = Expansion(
        tokens=mx.arange(10, 10 + drafted, dtype=mx.int32),
        scores=mx.array(-np.cumsum(losses, dtype=np.float32)),
        parents=mx.arange(-1, drafted - 1, dtype=mx.int32),
    )
    root = mx.array([9])
    chain = build_tree(expansion, root, DraftPlan.of(1, length, length))
    beam = merge_beams(expansion, root, DraftShape(1, length, "beam"))
    assert chain.scores is not None
    assert np.array_equal(chain.scores, expansion.scores)
    _assert_same(replace(chain, scores=None), beam)
    nodes = data.draw(st.integers(2, length))
    shorter = build_tree(expansion, root, DraftPlan.of(1, length, nodes))
    assert tree_paths(shorter) == tree_paths(chain)[:nodes]
    _assert_same(chain.first(nodes), shorter)


@given(st.integers(2, 4), st.integers(2, 5), st.data())
def test_the_first_nodes_of_a_tree_are_the_smaller_tree(
    width: int, length: int, data: st.DataObject
) -> None:
    largest = DraftShape(width, length).max_nodes
    size = data.draw(st.integers(2, largest))
    smaller = data.draw(st.integers(2, size))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    drafter = random_drafter(64, 32)
    embed = mx.array(rng.standard_normal((64, 32)), dtype=mx.float32)
    root = mx.array([5])
    plan = DraftPlan.of(width, length, size)
    expansion = expand(drafter, lambda tokens: embed[tokens], embed[9], root, plan.shape)
    tree = build_tree(expansion, root, plan)
    _assert_same(
        tree.first(smaller), build_tree(expansion, root, DraftPlan.of(width, length, smaller))
    )


def _assert_same(found: TokenTree, wanted: TokenTree) -> None:
    for name, value in vars(wanted).items():
        if name not in ("max_depth", "packed"):
            assert np.array_equal(vars(found)[name], value), name
    # A bound, which may be less for a tree that was cut.
    assert max(to_ints(found.depths)) <= found.max_depth <= wanted.max_depth


@pytest.mark.parametrize(("parents", "size"), [(1, 8), (3, 10), (3, 16), (4, 12)])
def test_padding_leaves_the_nodes_of_a_tree_alone(parents: int, size: int) -> None:
    """Six beams that share some of the tokens after the root."""
    width = 6
    above = [beam % parents for beam in range(width)]
    expansion = Expansion(
        tokens=mx.arange(2 * width, dtype=mx.int32),
        scores=-mx.arange(2 * width, dtype=mx.float32),
        parents=mx.array([-1] * width + above, dtype=mx.int32),
    )
    merged = merge_beams(expansion, mx.array([99]), DraftShape(width, 3, "beam"))
    tree = merged.padded(size)
    count = 1 + parents + width
    assert tree_paths(tree) == tree_paths(merged)
    assert len(tree_paths(tree)) == tree.num_nodes == count
    assert tree.tokens.shape == (size,)
    for values, padding in ((tree.tokens, NO_TOKEN), (tree.parents, 0), (tree.depths, 0)):
        assert np.array(values).tolist()[count:] == [padding] * (size - count)
    assert np.array_equal(np.array(tree.ancestors)[:count, :count], merged.ancestors)
    assert not np.any(np.array(tree.ancestors)[:count, count:]), "no node sees padding"


def test_what_the_host_reads_of_a_tree_is_what_the_device_has() -> None:
    tree = scored(TokenTree.of([9, 4, 5, 6], [0, 0, 1, 0]), [-0.25, -1.5, -2.0])
    found = tree.read()
    assert found.scores == [-0.25, -1.5, -2.0]
    assert (found.tokens, found.parents, found.depths) == ([4, 5, 6], [0, 1, 0], [1, 2, 1])


def test_a_subtree_has_the_drafts_in_the_order_asked_for() -> None:
    tree = scored(TokenTree.of([9, 4, 5, 6, 7], [0, 0, 1, 0, 2]), [-1.0, -2, -3, -4])
    part = tree.subtree([2, 0, 1])
    assert to_ints(part.tokens) == [9, 6, 4, 5]
    assert to_ints(part.parents) == [0, 0, 0, 2]
    assert to_ints(part.depths) == [0, 1, 1, 2]
    assert np.array_equal(part.ancestors, ancestor_mask(part.parents, 2))
    assert part.num_nodes == part.size == 4
    _assert_same(tree.subtree([0, 1]), tree.first(3))
    assert tree.subtree([]).size == 1
