"""Prefill of several sequences in shared forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target


def prefill_together(
    target: Target,
    beginnings: Sequence[Sequence[int]],
    caches: Sequence[TreeCache],
    step_size: int,
    is_cancelled: Callable[[], bool],
) -> None:
    """Process the beginnings of several sequences at once, in chunks, without logits.

    Shorter ones are padded on the right, where no token before the padding attends to it. Blocks
    until MLX has computed each chunk.

    Args:
        target: The model, whose layers all attend to all tokens.
        beginnings: Token ids of each sequence.
        caches: Empty caches, which get the K/V entries of their sequences.
        step_size: Maximum number of tokens per chunk, all sequences together.
        is_cancelled: Called before every chunk. True leaves all caches empty.
    """
    longest = max(map(len, beginnings))
    padded = mx.array([[*tokens, *[0] * (longest - len(tokens))] for tokens in beginnings])
    stock = target.stock_cache()
    size = max(1, step_size // len(beginnings))
    for start in range(0, longest, size):
        if is_cancelled():
            return
        target.model(padded[:, start : start + size], cache=stock)
        mx.eval([layer.state for layer in stock if layer.keys is not None])
        mx.clear_cache()
    for row, (tokens, cache) in enumerate(zip(beginnings, caches, strict=True)):
        for layer, own in zip(stock, cache.stock, strict=True):
            _copy_entries(layer, own, row, len(tokens))
        cache.grow(len(tokens))


def _copy_entries(layer: KVCache, own: KVCache, row: int, length: int) -> None:
    """Copy the entries of one sequence into its own cache of a layer."""
    if layer.keys is None or layer.values is None:  # a layer that the model never uses
        return
    parts = layer.keys, layer.values
    own.keys, own.values = (mx.contiguous(part[row : row + 1, :, :length]) for part in parts)
    own.offset = length
