"""Products of several rows with a quantised matrix, bit for bit those of one row at a time.

Axes: T rows of inputs, K inputs, N outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlx_redrafter.kernels.source import MOST_ROWS, SIMD_GROUPS, metal_source, tile
from mlx_redrafter.kernels.variant import LANES, Variant

# Rows that there are kernels for; more than `MOST_ROWS` take two launches.
ROWS = range(2, 2 * MOST_ROWS + 1)


def small_t(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, variant: Variant
) -> mx.array:
    """x times the transposed matrix.

    Args:
        x: Shape (T, K), the variant's dtype, T in `ROWS`.
        weight: Packed weights, shape (N, K * bits / 32).
        scales: Shape (N, K / group_size).
        biases: Shape (N, K / group_size).
        variant: Format of the weights and order of additions.

    Returns:
        Shape (T, N). What does not compile or run raises a RuntimeError when it is computed.
    """
    rows, outputs = x.shape[0], weight.shape[0]
    if rows > MOST_ROWS:
        half = (rows + 1) // 2
        parts = (x[:half], x[half:])
        return mx.concatenate([small_t(one, weight, scales, biases, variant) for one in parts])
    tiles = -(-outputs // tile(rows))
    (y,) = _kernel(variant, rows)(
        inputs=[x, weight, scales, biases],
        grid=(LANES, -(-tiles // SIMD_GROUPS) * SIMD_GROUPS, 1),
        threadgroup=(LANES, SIMD_GROUPS, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )
    return y


def as_integers(x: mx.array) -> mx.array:
    """Bits of floating-point numbers: NaNs are equal then, zeros of both signs are not."""
    return x.view(mx.uint32 if x.dtype == mx.float32 else mx.uint16)


@cache
def _kernel(variant: Variant, rows: int) -> Any:
    return mx.fast.metal_kernel(
        name=f"small_t_{rows}_{variant}",
        input_names=["x", "w", "scales", "biases"],
        output_names=["y"],
        source=metal_source(variant, rows),
    )
