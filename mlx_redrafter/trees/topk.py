"""Exact top-k over a vocabulary without sorting it.

Axes: R rows, V entries per row, k results per row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

# Minimum entries of a row that is not sorted whole.
MIN_SIZE = 512
# Minimum number of blocks per result in such a row.
MIN_BLOCKS = 2


class TopK(NamedTuple):
    """The k largest entries of each row, in descending order, and their indices."""

    values: mx.array
    indices: mx.array


def top_k(scores: mx.array, k: int) -> TopK:
    """Find the k largest entries of each row; of equal entries the first ones.

    All k entries lie in the k blocks with the largest maxima, so only these blocks are sorted.

    Args:
        scores: Shape (R, V), no NaN, and at least k entries above minus infinity in every row.
        k: Number of entries, 1 to V.

    Returns:
        Values of the dtype of ``scores`` and indices (uint32), both of shape (R, k).
    """
    size = scores.shape[-1]
    if k == 1:
        indices = mx.argmax(scores, axis=-1, keepdims=True)
    elif size < max(MIN_SIZE, MIN_BLOCKS * k * block_size(size, k)):
        indices = mx.argsort(-scores, axis=-1)[:, :k]
    else:
        indices = _by_blocks(scores, k, block_size(size, k))
    return TopK(mx.take_along_axis(scores, indices, axis=-1), indices)


def block_size(size: int, k: int) -> int:
    """Choose entries per block, a power of two, so that both stages sort about as many numbers."""
    return 1 << max(3, round(math.log2(size / k) / 2))


def _by_blocks(scores: mx.array, k: int, block: int) -> mx.array:
    rows, size = scores.shape
    num_blocks = -(-size // block)
    padding = num_blocks * block - size
    if padding:
        scores = mx.pad(scores, [(0, 0), (0, padding)], constant_values=-mx.inf)
    blocks = scores.reshape(rows, num_blocks, block)
    # Blocks in their order in the row, so that of equal entries the first ones come first.
    best = mx.sort(mx.argsort(-mx.max(blocks, axis=-1), axis=-1)[:, :k], axis=-1)
    entries = mx.take_along_axis(blocks, best[..., None], axis=1).reshape(rows, k * block)
    order = mx.argsort(-entries, axis=-1)[:, :k]
    return mx.take_along_axis(best, order // block, axis=-1) * block + order % block
