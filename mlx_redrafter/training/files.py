"""Files of a training run: arrays and JSON, written atomically."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.checkpoint_files import write_atomically, write_text
from mlx_redrafter.errors import CheckpointError

Arrays = dict[str, mx.array]

# Names of the incomplete files of `write_atomically`.
LEFTOVER = re.compile(r"\.[a-z0-9_]{8}\.(safetensors|json|md)")


def save_arrays(path: Path, arrays: Arrays, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; blocks until MLX has evaluated the arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        path,
        lambda temporary: mx.save_safetensors(
            str(temporary), arrays, metadata=dict(metadata or {})
        ),
    )


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


def remove_leftovers(folder: Path) -> None:
    """Delete the incomplete files of killed runs, in subfolders too."""
    for path in folder.rglob(".*"):
        if LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)
