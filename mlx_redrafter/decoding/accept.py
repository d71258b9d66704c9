"""Acceptance: the longest path of drafts that agree with the target's own choices.

Axes: N nodes of the tree, L its levels, the root's included (`TokenTree.max_depth` + 1).
"""

from __future__ import annotations

import mlx.core as mx

from mlx_redrafter.trees.tree import TokenTree

# Path, number of accepted drafts, bonus token, last node and tokens of the path, see `accept`.
Accepted = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]


def accept(tree: TokenTree, chosen: mx.array) -> Accepted:
    """Walk from the root for as long as the target's choice is one of the drafts.

    Every token on the path, and the bonus token, is the target's choice after its true prefix: the
    text is the target's whatever the tree. This is sample-then-match; for drafts that do not
    depend on the target's noise no lossless rule accepts more.

    Args:
        tree: The verified drafts.
        chosen: The target's token after every node, integer, shape (N,).

    Returns:
        Five arrays, all int32. Node indices of the path from the root on, shape (L,), of which the
        first ``num_accepted + 1`` are valid and the rest is junk. ``num_accepted``, the number of
        accepted drafts, 0 to L - 1, shape (1,). The target's own token after the path, which is
        the next root, shape (1,). Node index of the last accepted node, shape (1,). Tokens of the
        path, shape (L,), junk after the accepted ones.
    """
    chosen = chosen.astype(mx.int32)
    if tree.is_chain and tree.size > 1:
        return _accept_chain(tree, chosen)
    size, length = tree.size, tree.max_depth + 1
    is_root = mx.arange(size) == 0
    # Functions, not operators: under mx.vmap those do not broadcast (MLX 0.32.4).
    matches = mx.logical_or(tree.tokens == chosen[tree.parents], is_root)
    # A node is on the path when it and all its ancestors match; siblings are distinct, so the
    # nodes that are form one path.
    on_path = mx.all(mx.logical_or(mx.logical_not(tree.ancestors), matches), axis=1)
    num_accepted = mx.sum(on_path, keepdims=True).astype(mx.int32) - 1
    path = mx.argsort(mx.where(on_path, tree.depths, length))[:length].astype(mx.int32)
    if size < length:
        path = mx.pad(path, (0, length - size))
    last = path[num_accepted]
    return path, num_accepted, chosen[last], last, tree.tokens[path]


def _accept_chain(tree: TokenTree, chosen: mx.array) -> Accepted:
    """Do the same with fewer operations, whose number counts with small models and fast GPUs."""
    matches = (tree.tokens[1:] == chosen[:-1]).astype(mx.int32)
    num_accepted = mx.sum(mx.cumprod(matches), keepdims=True)
    return tree.depths, num_accepted, chosen[num_accepted], num_accepted, tree.tokens
