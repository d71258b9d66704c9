"""Caches and trees of any size, with arbitrary tokens: tokens do not change the cost of a pass."""

from __future__ import annotations

import mlx.core as mx

from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree

# Prompt tokens per forward pass. Fewer than mlx-lm's 2,048, so that the memory of attention scores,
# which plain and drafted decoding need, does not hide the difference.
PREFILL_STEP = 512


def prefill(
    target: Target, prompt: mx.array, cache: TreeCache, step_size: int = PREFILL_STEP
) -> TargetOutputs:
    """Process a prompt in chunks, and its last token alone as mlx-lm does.

    Blocks until MLX has computed the chunks. Returns the outputs of the last token, which MLX has
    not computed yet.
    """
    for start in range(0, prompt.shape[0] - 1, step_size):
        chunk = prompt[start : min(start + step_size, prompt.shape[0] - 1)]
        target.process_chunk(chunk, cache, ())
        mx.eval([layer.state for layer in cache.stock])
    return target.advance(prompt[-1:], cache)


def bushy_tree(size: int) -> TokenTree:
    """Make a binary tree of ``size`` nodes, filled level by level."""
    tree = TokenTree.of(range(size), [max(node - 1, 0) // 2 for node in range(size)])
    mx.eval(tree.arrays)
    return tree
