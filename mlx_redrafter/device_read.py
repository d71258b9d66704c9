"""The one place where the host waits for values of the device."""

from __future__ import annotations

from typing import cast

import mlx.core as mx


def to_ints(values: mx.array) -> list[int]:
    """Read an integer or bool array of shape (n,); waits until the device has computed it."""
    return cast("list[int]", values.tolist())


def to_floats(values: mx.array) -> list[float]:
    """Read a floating-point array of shape (n,); waits until the device has computed it."""
    return cast("list[float]", values.tolist())
