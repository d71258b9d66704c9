"""Tensors in weight files: dtype, shape and place; the values are read on demand, and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_redrafter.errors import CheckpointError

MAX_AXES = 8
# Dtypes to convert to, by name.
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
# numpy's dtype of each readable dtype on disk; bfloat16, which numpy lacks, is read as its bits.
_ON_DISK = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4", "int64": "<i8"}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight file, checked by the file's reader to lie inside the file.

    Attributes:
        path: The file.
        dtype: Name of the dtype, such as "float32"; dtypes that no drafter uses cannot be read.
        shape: Size of each axis, none of them negative.
        strides: Step of each axis, in elements, none of them negative.
        start: Offset of the first element in the file, in bytes.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self) -> mx.array:
        raw = np.dtype(_ON_DISK[self.dtype])
        count = count_spanned(self.shape, self.strides)
        flat = np.fromfile(self.path, raw, count, offset=self.start)
        if len(flat) != count:
            raise CheckpointError(f"{self.path} ends before its tensors do; download it again")
        steps = [stride * raw.itemsize for stride in self.strides]
        view = np.lib.stride_tricks.as_strided(flat, self.shape, steps)
        array = mx.array(np.ascontiguousarray(view))
        return array.view(mx.bfloat16) if self.dtype == "bfloat16" else array


def count_spanned(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Count the elements from the first to the last of a strided tensor, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Compute the strides of a row-major tensor, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
