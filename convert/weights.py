"""Reading of a drafter's weights, one tensor at a time, with checks and casts."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from mlx_redrafter.convert.stored import StoredTensor
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.escaping import join_shortened, quote

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def read_weights(
    sources: Mapping[str, str], tensors: Mapping[str, StoredTensor], dtype: str
) -> dict[str, mx.array]:
    """Read the drafter's tensors as ``dtype``, by this package's names.

    Args:
        sources: Name in the checkpoint by this package's name.
        tensors: Tensors by the names in the checkpoint.
        dtype: Name of the dtype of floating-point tensors.

    Shapes and dtypes must have been checked, so that memory is bounded by the drafter and one
    stored tensor. Waits for the device.
    """
    weights: dict[str, mx.array] = {}
    damaged: list[str] = []
    too_large: list[str] = []
    for own, source in sources.items():
        stored = tensors[source].read()
        cast = stored.astype(DTYPES[dtype]) if mx.issubdtype(stored.dtype, mx.floating) else stored
        if not _is_finite(cast):
            (too_large if _is_finite(stored) else damaged).append(quote(source))
        mx.eval(cast)
        weights[own] = cast
    if damaged:
        raise NonFiniteError(
            f"expected finite weights, found NaN or infinity in {join_shortened(damaged)}; "
            "the checkpoint is damaged or its training diverged"
        )
    if too_large:
        raise NonFiniteError(
            f"expected values within {dtype}, but values of {join_shortened(too_large)} are too "
            f"large for {dtype}; use --dtype bfloat16"
        )
    return weights


def _is_finite(array: mx.array) -> bool:
    return bool(mx.all(mx.isfinite(array)).item())
