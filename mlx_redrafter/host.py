"""The one place where the host waits for values of the device."""

from __future__ import annotations

from typing import cast

import mlx.core as mx


def to_ints(values: mx.array) -> list[int]:
    """Read an integer array of shape (n,); waits until the device has computed it."""
    return cast("list[int]", values.tolist())
