"""Trees of several texts beside each other."""

from __future__ import annotations

import mlx.core as mx

from mlx_redrafter.trees.tree import TokenTree, TreeBatch


def test_trees_and_roots_are_padded_to_the_largest() -> None:
    small = TokenTree.of([7, 8, 9], [0, 0, 1])
    large = TokenTree.of([1, 2, 3, 4], [0, 0, 1, 1])
    forest = TreeBatch([small, mx.array([5], dtype=mx.int32), large])
    assert (len(forest), forest.size, forest.max_depths) == (3, 4, [2, 0, 2])
    assert forest.tokens.tolist() == [[7, 8, 9, -1], [5, -1, -1, -1], [1, 2, 3, 4]]
    assert forest.parents.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 1]]
    assert forest.depths.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 1, 2, 2]]
    for ancestors, tree in zip(forest.ancestors, [small.padded(4), None, large], strict=True):
        expected = TokenTree.of([0] * 4, [0] * 4) if tree is None else tree
        assert mx.array_equal(ancestors[0], expected.ancestors[0])
        if tree is not None:
            assert mx.array_equal(ancestors, tree.ancestors)


def test_some_of_its_trees_keep_their_size() -> None:
    roots = [mx.array([token], dtype=mx.int32) for token in (3, 4, 5)]
    forest = TreeBatch([*roots, TokenTree.of([6, 7], [0, 0])]).of([2, 0])
    assert forest.tokens.tolist() == [[5, -1], [3, -1]]
    alone = TreeBatch(roots)
    assert alone.tokens.tolist() == [[3], [4], [5]]
    assert alone.ancestors.tolist() == [[[True]]] * 3
