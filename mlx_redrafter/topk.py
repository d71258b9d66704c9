"""Exact top-k over a vocabulary without sorting it.

Axes: R rows, V entries per row, k results per row.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

# Entries per block of the first stage. Below MIN_BLOCKS blocks per result a plain sort is cheaper.
BLOCK_SIZE = 256
MIN_BLOCKS = 4


class TopK(NamedTuple):
    """The k largest entries of each row, largest first, and where they stand."""

    values: mx.array
    indices: mx.array


def top_k(scores: mx.array, k: int) -> TopK:
    """The k largest entries of each row; of equal entries the first ones.

    Two stages, both exact: every entry among the k largest lies in one of the k blocks with the
    largest maxima, so only those blocks are sorted.

    Args:
        scores: Shape (R, V), no NaN, and at least k entries above minus infinity in every row.
        k: 1 to V.

    Returns:
        Values of the dtype of ``scores`` and indices (uint32), both of shape (R, k).
    """
    rows, size = scores.shape
    if k == 1:
        indices = mx.argmax(scores, axis=-1, keepdims=True)
    elif size < MIN_BLOCKS * k * BLOCK_SIZE:
        indices = mx.argsort(-scores, axis=-1)[:, :k]
    else:
        num_blocks = -(-size // BLOCK_SIZE)
        padding = num_blocks * BLOCK_SIZE - size
        if padding:
            scores = mx.pad(scores, [(0, 0), (0, padding)], constant_values=-mx.inf)
        blocks = scores.reshape(rows, num_blocks, BLOCK_SIZE)
        best = mx.sort(mx.argsort(-mx.max(blocks, axis=-1), axis=-1)[:, :k], axis=-1)
        entries = mx.take_along_axis(blocks, best[..., None], axis=1).reshape(rows, k * BLOCK_SIZE)
        order = mx.argsort(-entries, axis=-1)[:, :k]
        block = mx.take_along_axis(best, order // BLOCK_SIZE, axis=-1)
        indices = block * BLOCK_SIZE + order % BLOCK_SIZE
    return TopK(mx.take_along_axis(scores, indices, axis=-1), indices)
