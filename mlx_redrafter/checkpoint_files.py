"""Checkpoint folders: finding them, reading their config and headers, writing them atomically.

A checkpoint is a folder with ``config.json`` and ``*.safetensors``, local or on the Hugging Face
Hub. Nothing here runs code from a file, and nothing allocates what a header merely claims.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from mlx_redrafter.errors import CheckpointError, ConfigError, explain, first_line

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# Weight files of a folder; where there are none of a kind, those of the next.
WEIGHTS_PATTERNS = ("model*.safetensors", "medusa_lm_head.safetensors")
# The index of a sharded 400B model takes about a tenth of it.
MAX_JSON_BYTES = 2**24


def find_checkpoint(path_or_repo: str | Path, patterns: list[str] | None = None) -> Path:
    """Folder of a checkpoint, downloaded from the hub unless it exists locally.

    Args:
        path_or_repo: A local folder, or a repository id such as ``org/name``.
        patterns: Files to fetch from the hub, as shell patterns; all of them by default.

    Raises:
        CheckpointError: There is neither such a folder nor such a repository, or no network.
        ConfigError: It is no name.
    """
    if not isinstance(path_or_repo, (str, Path)):
        raise ConfigError(
            f"expected a checkpoint folder or a hub repository like org/name, got {path_or_repo!r}"
        )
    path = Path(path_or_repo).expanduser()
    try:
        os.scandir(path).close()
        return path
    except NotADirectoryError as error:
        raise CheckpointError(f"expected a checkpoint folder, found a file: {path}") from error
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # no right to read it, or no name at all
        reason = explain(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"cannot read the folder {path}: {reason}") from error
    name = str(path_or_repo)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(
            f"no such folder: {path}; give a checkpoint folder or a hub repository like org/name"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # its libraries have exceptions of their own, and change
        raise CheckpointError(
            f"{name!r} is neither a local folder nor a repository that can be reached on the "
            f"Hugging Face Hub ({first_line(error)}); check the name and the network, or give a "
            "folder"
        ) from error


def shared_name(path_or_repo: str | Path) -> str:
    """A name to publish: a repository id as it is, a folder by its last part, without its path."""
    path = Path(path_or_repo).expanduser()
    return path.resolve().name if path.is_dir() else str(path_or_repo)


def read_config(folder: Path) -> dict[str, Any]:
    """The object in ``folder/config.json``.

    Raises:
        CheckpointError: The file is missing, unreadable, or not a JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        path.stat()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no {CONFIG_FILE} in {folder}; is it a checkpoint folder?"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {explain(error)}") from error
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: The file is unreadable, absurdly long, or not a JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(
                f"expected at most {MAX_JSON_BYTES} bytes, found {path.stat().st_size}"
            )
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {explain(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; download or make it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"expected a JSON object in {path}, found {type(values).__name__}")
    return values


def read_shapes(folder: Path, files: list[Path] | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in ``folder/model*.safetensors``, or in files, from headers alone.

    Raises:
        CheckpointError: There is no such file, or one is truncated or no safetensors file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder) if files is None else files:
        try:
            path.open("rb").close()  # says what is wrong; the library has one word for everything
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {explain(error)}") from error
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({error}); download or convert it "
                "again"
            ) from error
    return shapes


def read_tensors(folder: Path) -> dict[str, mx.array]:
    """All tensors in ``folder/model*.safetensors``; the headers are checked first.

    Raises:
        CheckpointError: As `read_shapes`, or a dtype is unknown to MLX.
    """
    read_shapes(folder)
    tensors: dict[str, mx.array] = {}
    for path in weight_files(folder):
        try:
            tensors.update(mx.load(str(path)))  # type: ignore[arg-type]
        except RuntimeError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder, in order of their names.

    Raises:
        CheckpointError: There is none.
    """
    for pattern in WEIGHTS_PATTERNS:
        if paths := sorted(folder.glob(pattern)):
            return paths
    raise CheckpointError(f"no {WEIGHTS_PATTERNS[0]} in {folder}")


def has_weights(folder: Path) -> bool:
    """Whether a folder has weight files."""
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS_PATTERNS)


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
    framework: str = "mlx",
) -> None:
    """Write ``config.json`` and ``model.safetensors``; each file appears whole or not at all.

    The config comes last, so that a folder with a config has its weights. ``framework`` is what
    the header says the tensors are for. Waits for the device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / WEIGHTS_FILE,
        lambda path: mx.save_safetensors(str(path), dict(tensors), metadata={"format": framework}),
    )
    text = json.dumps(config, indent=2) + "\n"
    write_atomically(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def named_parameters(module: nn.Module) -> dict[str, mx.array]:
    """All arrays of a module by their dotted names."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path beside ``path``, then move the result into place.

    The temporary name keeps the suffix, which some writers insist on.

    Raises:
        OSError: It cannot be written; the error names ``path``.
    """
    with naming(path):
        handle, name = tempfile.mkstemp(prefix=".", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            temporary.chmod(0o644)  # mkstemp makes it private
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of files made on the way to ``path`` name it, MLX's among them."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it says all in words
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except RuntimeError as error:  # all that MLX says
        raise OSError(errno.EIO, first_line(error), str(path)) from error
