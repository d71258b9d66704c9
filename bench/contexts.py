"""Made-up text and trees of any size: what they hold does not change what they cost."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from mlx_redrafter.tree import TokenTree, ancestor_mask

# Prompt tokens per forward pass. Below mlx-lm's 2,048, so that memory for attention scores, which
# both ways of decoding need, does not hide what differs.
PREFILL_STEP = 512


def filled_cache(target: Target, length: int) -> TreeCache:
    """A cache that holds ``length`` tokens; `TreeCache.settle` shortens it.

    Waits for the device.
    """
    cache = target.new_cache()
    tokens = mx.arange(length, dtype=mx.int32) % target.vocab_size
    with mx.stream(generation_stream):
        forward = target.prefill(tokens, cache, PREFILL_STEP, lambda done, total: None)
        mx.eval(forward.logits)
    return cache


def bushy_tree(size: int) -> TokenTree:
    """A tree of ``size`` nodes, every node with two children as far as they go."""
    parents = mx.maximum((mx.arange(size, dtype=mx.int32) - 1) // 2, 0)
    depths = mx.array([(node + 1).bit_length() - 1 for node in range(size)], dtype=mx.int32)
    tree = TokenTree(
        tokens=mx.arange(size, dtype=mx.int32),
        parents=parents,
        depths=depths,
        ancestors=ancestor_mask(parents, size.bit_length()),
        num_nodes=size,
        num_unmerged=size,
    )
    mx.eval(tree.arrays)
    return tree
