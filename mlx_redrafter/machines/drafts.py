"""Drafts as rank 0 describes them to the other ranks: numbers on the host, and arrays to gather.

Axes: N nodes of a tree with padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_redrafter.trees.tree import TokenTree, ancestor_mask

# A root alone, or a tree.
Draft = mx.array | TokenTree


def describe(draft: Draft) -> tuple[tuple[int, ...], list[mx.array]]:
    """Separate what the host knows of a draft from what it may not know yet.

    Returns:
        N, the number of nodes without padding, 0 for a root alone, the maximum depth, and the
        number of arrays; and these arrays, each of shape (N,): the tokens, and the parents and
        depths of a tree that is no chain.
    """
    if not isinstance(draft, TokenTree):
        return (1, 0, 0, 1), [draft]
    arrays = [draft.tokens] if draft.is_chain else [draft.tokens, draft.parents, draft.depths]
    return (draft.size, draft.num_nodes, draft.max_depth, len(arrays)), arrays


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
