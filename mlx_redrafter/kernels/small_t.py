"""Products of several rows with a matrix, bit for bit those of one row at a time.

Axes: T rows of inputs, K inputs, N outputs.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_redrafter.kernels.dense_source import dense_source
from mlx_redrafter.kernels.metal_source import MAX_ROWS, KernelSource, metal_source
from mlx_redrafter.kernels.variant import LANES, AnyVariant, DenseVariant

# Numbers of rows that have kernels; more than `MAX_ROWS` rows need two launches.
ROWS = range(2, 2 * MAX_ROWS + 1)


def small_t(x: mx.array, matrix: Sequence[mx.array], variant: AnyVariant) -> mx.array:
    """Multiply x, in the variant's dtype, with the transposed matrix: (T, K) to (T, N).

    T is in `ROWS`. The matrix has weights of shape (N, K). A quantised one has packed weights of
    shape (N, K * bits / 32), then scales and, if affine, biases of shape (N, K / group_size). MLX
    raises a RuntimeError when it computes a kernel that does not compile.
    """
    rows, outputs = x.shape[0], matrix[0].shape[0]
    if rows > MAX_ROWS:
        half = (rows + 1) // 2
        return mx.concatenate([small_t(one, matrix, variant) for one in (x[:half], x[half:])])
    source = source_of(variant, rows)
    (y,) = _kernel(variant, rows)(
        inputs=[x, *matrix],
        grid=(LANES, -(-outputs // source.outputs) * source.simd_groups, 1),
        threadgroup=(LANES, source.simd_groups, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )
    return y


@cache
def source_of(variant: AnyVariant, rows: int) -> KernelSource:
    """Return the source of the kernel for T rows, T at most `MAX_ROWS`."""
    if isinstance(variant, DenseVariant):
        return dense_source(variant, rows)
    return metal_source(variant, rows)


def as_integers(x: mx.array) -> mx.array:
    """View floating-point numbers as integers: equal NaNs are equal then, 0 and -0 are not."""
    return x.view(mx.uint32 if x.dtype == mx.float32 else mx.uint16)


@cache
def _kernel(variant: AnyVariant, rows: int) -> Any:
    source = source_of(variant, rows)
    return mx.fast.metal_kernel(
        name=f"small_t_{rows}_{variant}",
        input_names=["x", *source.matrix],
        output_names=["y"],
        source=source.body,
    )
