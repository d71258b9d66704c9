"""Token trees: ancestors, padding and static sizes, alone and beside each other, and `top_k`."""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.decoding.sampling import block_size, top_k
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.proposers.search import Expansion, build_tree, merge_beams
from mlx_redrafter.trees.tree import NO_TOKEN, Drafts, TokenTree, TreeBatch, ancestor_mask
from tests.helpers.drafts import scored
from tests.helpers.models import expand, random_drafter
from tests.helpers.oracles import tree_paths


def _expansion(tokens: Iterable[int], scores: Any, parents: Iterable[int]) -> Expansion:
    places = (mx.array([*one], dtype=mx.int32) for one in (tokens, parents))
    return Expansion(next(places), mx.array(scores, dtype=mx.float32), next(places))


def test_of_equal_scores_the_parent_comes_first():
    # A certain continuation costs nothing, so that child and parent tie.
    expansion = _expansion(range(1, 7), [-0.5] * 6, [-1, -1, -1, 0, 0, 1])
    for nodes in range(2, 8):
        tree = build_tree(expansion, mx.array([9]), DraftPlan.of(2, 3, nodes))
        assert len(tree_paths(tree)) == nodes  # checks that every parent is there


@given(st.integers(2, 16), st.data())
def test_a_chain_is_what_the_best_nodes_and_the_one_beam_are(length, data):
    drafted = length - 1
    losses = data.draw(st.lists(st.floats(0, 5, width=32), min_size=drafted, max_size=drafted))
    scores = -np.cumsum(losses, dtype=np.float32)
    expansion = _expansion(range(10, 10 + drafted), scores, range(-1, drafted - 1))
    root = mx.array([9])
    chain = build_tree(expansion, root, DraftPlan.of(1, length, length))
    beam = merge_beams(expansion, root, DraftShape(1, length, "beam"))
    assert chain.read().scores == scores.tolist()
    _assert_same(chain, beam)
    nodes = data.draw(st.integers(2, length))
    shorter = build_tree(expansion, root, DraftPlan.of(1, length, nodes))
    assert tree_paths(shorter) == tree_paths(chain)[:nodes]
    _assert_same(chain.first(nodes), shorter)


@given(st.integers(2, 4), st.integers(2, 5), st.data())
def test_the_first_nodes_of_a_tree_are_the_smaller_tree(width, length, data):
    size = data.draw(st.integers(2, DraftShape(width, length).max_nodes))
    smaller = data.draw(st.integers(2, size))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    drafter = random_drafter(64, 32)
    embed = mx.array(rng.standard_normal((64, 32)), dtype=mx.float32)
    root = mx.array([5])
    plan = DraftPlan.of(width, length, size)
    expansion = expand(drafter, lambda tokens: embed[tokens], embed[9], root, plan.shape)
    wanted = build_tree(expansion, root, DraftPlan.of(width, length, smaller))
    _assert_same(build_tree(expansion, root, plan).first(smaller), wanted)


def _assert_same(found: TokenTree, wanted: TokenTree) -> None:
    for name, value in vars(wanted).items():
        if name not in ("max_depth", "packed"):
            assert np.array_equal(vars(found)[name], value), name
    # A bound, which may be less for a tree that was cut.
    assert max(to_ints(found.depths)) <= found.max_depth <= wanted.max_depth


@pytest.mark.parametrize(("parents", "size"), [(1, 8), (3, 10), (3, 16), (4, 12)])
def test_padding_leaves_the_nodes_of_a_tree_alone(parents, size):
    """Six beams that share some of the tokens after the root."""
    width = 6
    above = [beam % parents for beam in range(width)]
    expansion = _expansion(range(12), -np.arange(12.0), [-1] * width + above)
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


def test_a_subtree_has_the_drafts_in_the_order_asked_for():
    tree = scored(TokenTree.of([9, 4, 5, 6, 7], [0, 0, 1, 0, 2]), [-1.0, -2, -3, -4])
    found = tree.read()
    assert (found.tokens, found.parents, found.depths) == ([4, 5, 6, 7], [0, 1, 0, 2], [1, 2, 1, 3])
    assert found.scores == [-1.0, -2.0, -3.0, -4.0]
    part = tree.subtree([2, 0, 1])
    assert to_ints(part.tokens) == [9, 6, 4, 5]
    assert to_ints(part.parents) == [0, 0, 0, 2]
    assert to_ints(part.depths) == [0, 1, 1, 2]
    assert np.array_equal(part.ancestors, ancestor_mask(part.parents, 2))
    assert part.num_nodes == part.size == 4
    _assert_same(tree.subtree([0, 1]), tree.first(3))
    assert tree.subtree([]).size == 1
    among = Drafts([-1.0, -1.5, -2.0], [1, 2, 1], [0, 1, 0], [8, 3, 4])
    part = tree.subtree([0, 2, 1], among)
    assert [*map(list, tree_paths(part))] == [[9], [9, 8], [9, 4], [9, 8, 3]]
    assert part.known == Drafts([-1.0, -2.0, -1.5], [1, 1, 2], [0, 0, 1], [8, 4, 3])


def test_trees_and_roots_of_several_texts_are_padded_to_the_largest():
    small, large = TokenTree.of([7, 8, 9], [0, 0, 1]), TokenTree.of([1, 2, 3, 4], [0, 0, 1, 1])
    root = mx.array([5], dtype=mx.int32)
    forest = TreeBatch([small, root, large])
    assert (len(forest), forest.size, forest.max_depths) == (3, 4, [2, 0, 2])
    assert forest.tokens.tolist() == [[7, 8, 9, -1], [5, -1, -1, -1], [1, 2, 3, 4]]
    assert forest.parents.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 1]]
    assert forest.depths.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 1, 2, 2]]
    for found, tree in ((forest.ancestors[0], small.padded(4)), (forest.ancestors[2], large)):
        assert mx.array_equal(found, tree.ancestors)
    assert forest.ancestors[1, 0].tolist() == [True, False, False, False]
    # Some of them keep their size.
    assert forest.of([1, 0]).tokens.tolist() == [[5, -1, -1, -1], [7, 8, 9, -1]]
    assert TreeBatch([root, root]).ancestors.tolist() == [[[True]]] * 2


def _check(scores: np.ndarray, k: int) -> None:
    values, indices = top_k(mx.array(scores), k)
    expected = np.argsort(-scores, axis=-1, kind="stable")[:, :k]
    assert np.array_equal(np.array(indices), expected)
    assert np.array_equal(np.array(values), np.take_along_axis(scores, expected, axis=-1))


@pytest.mark.parametrize("size", [3, 256, 1023, 1024, 1025, 4097, 50257])
@pytest.mark.parametrize("k", [1, 2, 16, 64])
@pytest.mark.parametrize("levels", [None, 1, 2, 40])
def test_the_best_scores_and_of_equal_ones_the_first(size, k, levels):
    rng = np.random.default_rng(size)
    scores = rng.integers(0, levels, (3, size)) if levels else rng.standard_normal((3, size))
    _check(scores.astype(np.float32), min(k, size))


def test_winners_in_one_block_in_the_padded_last_one_and_among_infinities():
    size = 4099
    assert size % block_size(size, 4)
    scores = np.zeros((3, size), dtype=np.float32)
    scores[0, 512:516] = [4, 3, 2, 1]  # one block has all of them
    scores[1, -3:] = [1, 3, 2]  # beyond the last full block
    scores[2] = -np.inf
    scores[2, [7, 4000, 4001, 4098]] = [-1e30, -5, -6, -5]
    _check(scores, 4)
