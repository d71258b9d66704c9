"""Tensors in weight files: dtype, shape and place; the values are read on demand, and checked."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_redrafter.checkpoint_files import read_headers
from mlx_redrafter.errors import CheckpointError

MAX_AXES = 8
# numpy's dtype of each readable dtype on disk; bfloat16, which numpy lacks, is read as its bits.
_ON_DISK = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4", "int64": "<i8"}
# Names of the dtypes of safetensors that can be read.
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "I64": "int64"}


class StoredTensor(NamedTuple):
    """One tensor of a weight file, checked by the file's reader to lie inside the file.

    ``dtype`` is a name such as "float32"; dtypes that no drafter uses cannot be read. No axis of
    ``shape`` is negative.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], mx.array]


def read_strided(
    path: Path, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], start: int
) -> mx.array:
    """Read values of any strides, in elements, from an offset in bytes on."""
    raw = np.dtype(_ON_DISK[dtype])
    count = count_spanned(shape, strides)
    flat = np.fromfile(path, raw, count, offset=start)
    if len(flat) != count:
        raise CheckpointError(f"{path} ends before its tensors do; download it again")
    view = np.lib.stride_tricks.as_strided(flat, shape, [one * raw.itemsize for one in strides])
    array = mx.array(np.ascontiguousarray(view))
    return array.view(mx.bfloat16) if dtype == "bfloat16" else array


def count_spanned(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Count the elements from the first to the last of a strided tensor, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def read_safetensors_file(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a safetensors file, without their values."""
    tensors = {}
    for name, header in read_headers(path).items():
        dtype, read = header.get_dtype(), partial(_read_safetensor, path, name)
        tensors[name] = StoredTensor(_NAMES.get(dtype, dtype), (*header.get_shape(),), read)
    return tensors


def _read_safetensor(path: Path, name: str) -> mx.array:
    try:
        tensors: Any = mx.load(str(path))  # computes no other tensor
    except RuntimeError as error:  # MLX has no such dtype, of whatever tensor
        raise CheckpointError(f"cannot read {path}: {error}; save it in float32") from error
    return tensors[name]
