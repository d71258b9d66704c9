"""Few shapes of attention, for MLX's CUDA back end.

For more than one query in 16 bits, that back end builds a cuDNN graph for every shape of queries,
keys and mask. That takes tens of milliseconds (MLX pull request 2743), and a sequence is longer in
every step. So a pass over trees attends to a whole bucket of K/V entries. Its masks hide those that
do not belong to the sequence yet. Metal and the CPU build nothing per shape, so they have no
buckets, whose entries they would compute for nothing.

Axes: N nodes of a tree, S entries that a pass attends to.
"""

from contextvars import ContextVar
from typing import Any

import mlx.core as mx

from mlx_redrafter.target.hooks import Call, Scoped

# Number of entries of the smallest bucket, the step by which mlx-lm's buffers grow.
BUCKET = 256
# A bucket holds at most one of this number of parts more than half of its entries.
PARTS = 8

# Boolean masks of a pass with the additive ones that replace them, by id and dtype.
Masks = dict[tuple[int, mx.Dtype], tuple[mx.array, mx.array]]

_additive: ContextVar[Masks | None] = ContextVar("additive", default=None)


def pays_on_device(dtype: mx.Dtype) -> bool:
    """Whether the back end builds a graph for every shape of attention in this dtype."""
    return mx.cuda.is_available() and dtype in (mx.float16, mx.bfloat16)


def bucket(num_entries: int) -> int:
    """Round up to whole buckets, of which there are few for any length.

    Buckets are 256 entries apart at first, and at most 12.5% of the entries beyond 2,048.
    """
    power = 1 << max(0, num_entries - 1).bit_length() >> 1
    step = max(BUCKET, power // PARTS)
    return -(-num_entries // step) * step


def additive_masks() -> Scoped[Masks]:
    """Let attention in the forward passes built inside use additive masks, made once for all."""
    return Scoped(_additive, {})


def attend_with_additive_mask(call: Call, *arrays: Any, mask: Any, **options: Any) -> Any:
    """Hook for mlx-lm's attention: give it an additive mask instead of a boolean one.

    The CUDA back end turns a boolean mask into an additive one in every layer.
    """
    masks = _additive.get()
    if masks is not None and isinstance(mask, mx.array) and mask.dtype == mx.bool_:
        dtype = arrays[0].dtype
        key = id(mask), dtype
        if key not in masks:  # the entry keeps the mask, so that no other one gets its id
            masks[key] = mask, mx.where(mask, 0, -mx.inf).astype(dtype)
        mask = masks[key][1]
    return call(*arrays, mask=mask, **options)
