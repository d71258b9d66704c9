"""Tensors in weight files: dtype, shape and place; the values are read on demand, and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.escaping import describe_error

MAX_AXES = 8
# numpy's dtype of each readable dtype on disk; bfloat16, which numpy lacks, is read as its bits.
_ON_DISK = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4", "int64": "<i8"}
# Names of the dtypes of safetensors that can be read.
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "I64": "int64"}


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


class SafeTensor(NamedTuple):
    """One tensor of a safetensors file; the attributes are as in `StoredTensor`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> mx.array:
        tensors: Any = mx.load(str(self.path))  # computes no other tensor
        array: mx.array = tensors[self.name]
        return array


def read_safetensors_file(path: Path) -> dict[str, SafeTensor]:
    """Read the tensors of a safetensors file, without their values.

    The library checks that dtypes, shapes and offsets agree, and that the tensors fill the file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            found = {name: file.get_slice(name) for name in file.keys()}
            return {
                name: SafeTensor(
                    path, name, _NAMES.get(one.get_dtype(), one.get_dtype()), (*one.get_shape(),)
                )
                for name, one in found.items()
            }
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({describe_error(error)}); download it "
            "again"
        ) from error
