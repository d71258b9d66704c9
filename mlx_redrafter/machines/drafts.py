"""Drafts as rank 0 describes them to the other ranks: numbers on the host, and arrays to gather.

Axes: N nodes of a tree with padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_redrafter.trees.tree import TokenTree, ancestor_mask

# A root alone, or a tree.
Draft = mx.array | TokenTree
# Number of numbers that describe a draft.
NUM_FACTS = 4


def describe(draft: Draft) -> tuple[int, int, int, int]:
    """Return N, the number of nodes without padding, the maximum depth, and the number of arrays.

    The number of nodes is 0 for a root alone.
    """
    if not isinstance(draft, TokenTree):
        return 1, 0, 0, 1
    return draft.size, draft.num_nodes, draft.max_depth, len(arrays(draft))


def arrays(draft: Draft) -> list[mx.array]:
    """List what ranks cannot know: the tokens of a root or a chain, the parents and depths, too.

    Each has the shape (N,).
    """
    if not isinstance(draft, TokenTree):
        return [draft]
    return [draft.tokens] if draft.is_chain else [draft.tokens, draft.parents, draft.depths]


def num_values(facts: Sequence[int]) -> int:
    """Return the number of values in the arrays of a draft."""
    return facts[0] * facts[3]


def rebuild(facts: Sequence[int], values: mx.array) -> Draft:
    """Make a draft of its description and its arrays one after the other, int32."""
    size, num_nodes, depth, num_arrays = facts
    if num_nodes == 0:
        return values
    if num_arrays == 1:
        return TokenTree.chain(values, num_nodes)
    tokens, parents, depths = values[:size], values[size : 2 * size], values[2 * size :]
    return TokenTree(
        tokens, parents, depths, ancestor_mask(parents, depth), num_nodes, num_nodes, depth
    )
