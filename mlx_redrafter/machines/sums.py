"""Sums over three and more ranks whose bits do not depend on a row's place in the message.

MLX's ring adds each part of a message beginning with another rank. So a node of a tree is rounded
differently from the same token alone, and a drafted text would not be the plain one. Two ranks have
no order: a + b is b + a.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

# Maximum number of rows to gather: those of the largest trees of a batch. Longer messages are
# chunks of prompts, which are the same with drafts and without; a sum by MLX sends fewer bytes.
MOST_ROWS = 512

_stock_sum = mx.distributed.all_sum


def sum_in_rank_order(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
    """Add the arrays of all ranks, rank 0 first, in place of ``mx.distributed.all_sum``."""
    if x.ndim == 0 or x.size > MOST_ROWS * x.shape[-1]:
        return _stock_sum(x, group=group, stream=stream)
    first, *rest = mx.distributed.all_gather(x[None], group=group, stream=stream)
    return sum(rest, start=first)


def use_rank_order() -> None:
    """Let all models of this process add in the order of ranks."""
    mx.distributed.all_sum = sum_in_rank_order
