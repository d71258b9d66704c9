"""Read values of MLX arrays on the host, which blocks until MLX has computed them.

No other module of the decoding step reads arrays.
"""

from __future__ import annotations

from typing import cast

import mlx.core as mx


def to_ints(values: mx.array) -> list[int]:
    """Read an integer or bool array of shape (n,)."""
    return cast("list[int]", values.tolist())


def to_floats(values: mx.array) -> list[float]:
    """Read a floating-point array of shape (n,)."""
    return cast("list[float]", values.tolist())
