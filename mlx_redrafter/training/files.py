"""Files of a training run, written atomically, and what tells runs apart.

A quantised copy, an adapter or a later checkpoint of the same name has other hidden states, so
drafters and caches made with one of them must not be used with another.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checkpoint_files import (
    INCOMPLETE,
    named_parameters,
    write_atomically,
    write_text,
)
from mlx_redrafter.errors import CheckpointError, ConfigError

Arrays = dict[str, mx.array]

# Unsigned integer dtypes by the size of an element, in bytes.
_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def save_arrays(path: Path, arrays: Arrays, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; blocks until MLX has evaluated the arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = dict(metadata or {})
    write_atomically(path, lambda temporary: mx.save_safetensors(str(temporary), arrays, header))


def load_arrays(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Load the arrays of a safetensors file and the metadata in its header."""
    try:
        arrays, metadata = mx.load(str(path), return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {path} ({error}); delete it, and training makes it again"
        ) from error
    return dict(arrays), dict(metadata)  # type: ignore[arg-type]


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(values, indent=2) + "\n")


def find_difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Describe the first value in which the identities of two runs differ; None if they agree."""
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            return f"{name}: expected {expected.get(name)!r}, found {found.get(name)!r}"
    return None


def fingerprint_weights(model: nn.Module) -> str:
    """Hash names, shapes, dtypes and values of all weights; blocks until MLX has evaluated them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named_parameters(model).items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype} {_checksums(tensor)}\n".encode())
    return digest.hexdigest()[:16]


def _checksums(tensor: mx.array) -> object:
    """Sum the bit patterns, and the products of neighbouring ones, modulo 2^32."""
    bits = tensor.flatten().view(_UNSIGNED[tensor.dtype.size]).astype(mx.uint32)
    return mx.stack([mx.sum(bits), mx.sum(bits[1:] * bits[:-1])]).tolist()


def remove_leftovers(folder: Path) -> None:
    """Delete the incomplete files of killed runs, in subfolders too."""
    for path in folder.rglob(".*"):
        if INCOMPLETE.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


@contextmanager
def locking(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which is made if it is missing.

    The lock ends with the process, however that ends.

    Raises:
        ConfigError: Another run has the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another run trains in {folder}; wait for its end, or choose another --out"
            ) from error
        except OSError:
            pass  # the file system has no locks
        yield
    finally:
        os.close(handle)
