"""Weight files in the safetensors format, checked by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mlx_redrafter.convert.stored import MAX_AXES, StoredTensor, contiguous_strides
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.escaping import describe_error, quote

# Maximum size of a header in bytes; a 70B model's has 200 kB. Parsed, the 100 MB that the library
# allows would need gigabytes.
MAX_HEADER_BYTES = 2**22
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "I64": "int64"}


def read_safetensors_file(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a safetensors file, without their values."""
    header_size = _read_header_size(path)
    try:
        # The library checks that dtypes, shapes and offsets agree and that the tensors fill the
        # file exactly.
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            file.seek(8)
            header = json.loads(file.read(header_size), object_pairs_hook=_reject_duplicates)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({describe_error(error)}); download it "
            "again"
        ) from error
    header.pop("__metadata__", None)
    return {
        name: _describe_stored(path, name, description, 8 + header_size)
        for name, description in header.items()
    }


def _read_header_size(path: Path) -> int:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"expected a safetensors header of at most {MAX_HEADER_BYTES} bytes in {path}, "
            f"found a claim of {size}"
        )
    return size


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object whose names differ; the library silently keeps the last of two."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the name {quote(name)} appears twice")
        values[name] = value
    return values


def _describe_stored(
    path: Path, name: str, description: dict[str, Any], data_start: int
) -> StoredTensor:
    dtype = description["dtype"]
    shape = tuple(description["shape"])
    if len(shape) > MAX_AXES:
        raise CheckpointError(
            f"expected at most {MAX_AXES} axes of {quote(name)} in {path}, found {len(shape)}"
        )
    return StoredTensor(
        path,
        _DTYPES.get(dtype, dtype),
        shape,
        contiguous_strides(shape),
        data_start + description["data_offsets"][0],
    )
