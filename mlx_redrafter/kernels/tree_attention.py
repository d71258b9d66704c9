"""Attention of a tree's nodes, bit for bit that of one token at a time.

Axes: N nodes of a tree, S committed tokens, D head size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlx_redrafter.kernels.attention_source import THREADS, AttentionVariant, attention_source


def tree_attention(
    queries: mx.array, keys: mx.array, values: mx.array, parents: mx.array, scale: float
) -> mx.array:
    """Let the nodes of one tree attend to all committed tokens, their ancestors and themselves.

    Args:
        queries: Shape (1, heads, N, D), in the dtype of keys and values.
        keys: Shape (1, key heads, S + N, D), with the entries of the nodes at the end.
        values: Shape (1, key heads, S + N, D).
        parents: Node index of each node's parent, int32, shape (N,); the root's is 0.
        scale: Factor of the scores.

    Returns:
        Shape (1, heads, N, D). MLX raises a RuntimeError when it computes a kernel that does not
        compile.
    """
    _, heads, nodes, head_size = queries.shape
    dtype = str(queries.dtype).removeprefix("mlx.core.")
    (y,) = _kernel(AttentionVariant(head_size, dtype))(
        inputs=[queries, keys, values, parents, mx.array(scale, dtype=mx.float32)],
        grid=(heads * THREADS, nodes, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return y


@cache
def _kernel(variant: AttentionVariant) -> Any:
    return mx.fast.metal_kernel(
        name=f"tree_attention_{variant}",
        input_names=["queries", "keys", "values", "parents", "scale"],
        output_names=["y"],
        source=attention_source(variant),
        ensure_row_contiguous=False,  # keys are a slice of a buffer, which MLX would copy
    )
