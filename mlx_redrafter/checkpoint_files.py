"""Find checkpoint folders, read their config and headers, and write them atomically.

A checkpoint is a folder with ``config.json`` and ``*.safetensors``, local or on the Hugging Face
Hub. Nothing here runs code from a file, waits for a pipe, or allocates what a header merely claims.
"""

import errno
import fcntl
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from mlx_redrafter.errors import (
    CheckpointError,
    ConfigError,
    describe_error,
    explain,
    first_line,
    quote,
)
from mlx_redrafter.model_store import find_stored, is_path, repository_of

CONFIG_FILE = "config.json"
# Name of the weights that `write_checkpoint` writes.
WEIGHTS_FILE = "model.safetensors"
# Patterns of weight files; the first pattern that matches a file of the folder counts.
WEIGHTS_PATTERNS = ("model*.safetensors", "medusa_lm_head.safetensors")
# Beginning of the names of incomplete files, which no file of a user has: `.eslintrc.json` is one.
UNFINISHED = ".unfinished-"
# Names of the incomplete files of `write_atomically`, and of the folders of `publish`.
INCOMPLETE = re.compile(rf"{re.escape(UNFINISHED)}[a-z0-9_]{{8}}(\.(safetensors|json|md|png))?")
# Maximum size of a JSON file in bytes, ten times the index of a sharded 400B model.
MAX_JSON_BYTES = 2**24


def find_checkpoint(
    path_or_repo: str | Path, patterns: list[str] | None = None, target: str = ""
) -> Path:
    """Find the folder of a checkpoint, and download it from the hub unless it exists locally.

    The network is used only if neither the Hugging Face cache nor LM Studio has the files.

    Args:
        path_or_repo: A local folder, a repository id such as ``org/name``, or the last part of the
            id of a repository on this machine.
        patterns: Shell patterns of the files to download; all files by default.
        target: Model that a drafter is for: never the name that was meant.

    Raises:
        CheckpointError: There is no such folder or repository, no network, or other files than
            asked for; or several repositories end in this name. Or the folder holds a pipe, a
            socket or a device, whose reader could wait for ever.
        ConfigError: ``path_or_repo`` is neither a string nor a path, or empty.
    """
    if not isinstance(path_or_repo, (str, Path)) or not str(path_or_repo):
        raise ConfigError(
            f"expected a checkpoint folder or a hub repository like org/name, got {path_or_repo!r}"
        )
    path = expand_home(path_or_repo)
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                check_regular(Path(entry))
        return path
    except NotADirectoryError as error:
        raise CheckpointError(f"expected a checkpoint folder, found a file: {path}") from error
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # no permission, or an impossible name
        reason = explain(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"cannot read the folder {path}: {reason}") from error
    name = str(path_or_repo)
    is_name = not is_path(name)
    if is_name and (stored := find_stored(name, patterns)) is not None:
        return stored
    if not is_name or "/" not in name:
        raise CheckpointError(
            f"no such folder: {path}; give a checkpoint folder or a hub repository like org/name, "
            "or a name that redrafter-mlx list shows"
        )
    # Takes 0.2 s, which most commands can save.
    from mlx_redrafter.hub import fetch

    return fetch(name, patterns, target)


def expand_home(path: str | Path) -> Path:
    """Replace a leading ``~``; raise `ConfigError` if it is nobody's home, or for invalid UTF-8."""
    check_encoding(path)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"expected a path, got {str(path)!r}: nobody here has this name; your own home is ~/"
        ) from error


def check_encoding(path: str | Path) -> None:
    """Raise `ConfigError` unless a path is valid UTF-8: MLX reads and writes no other files."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:  # Python has lone surrogates for the other bytes
        raise ConfigError(
            f"expected a path in UTF-8, got {quote(str(path))}; rename it, or choose another"
        ) from error


def check_regular(path: Path) -> None:
    """Raise `CheckpointError` if a path leads to a pipe, a socket or a device."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CheckpointError(
            f"expected a regular file, found a pipe, a socket or a device: {path}; remove it, or "
            "choose another folder"
        )


def shared_name(path_or_repo: str | Path) -> str:
    """Return a name to publish: a repository id, also that of its folder, or a folder's name."""
    path = expand_home(path_or_repo)
    return repository_of(path) if path.is_dir() else str(path_or_repo)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the object in ``folder/config.json``; raise `CheckpointError` if there is none."""
    try:
        return read_json(folder / CONFIG_FILE)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CheckpointError(f"no {CONFIG_FILE} in {folder}{_explain(folder)}") from error
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raise `CheckpointError` if it is unreadable, longer than `MAX_JSON_BYTES`, not a regular file,
    or not a JSON object.
    """
    try:
        check_regular(path)
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
    """Read the shapes of all tensors in a folder, or in files, from their headers alone.

    Raise `CheckpointError` if a file is missing, truncated, or not a safetensors file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder) if files is None else files:
        shapes |= {name: (*header.get_shape(),) for name, header in read_headers(path).items()}
    return shapes


def read_headers(path: Path) -> dict[str, Any]:
    """Read safetensors' slices of all tensors of a file, which know their dtypes and shapes.

    The library checks that dtypes, shapes and offsets agree, and that the tensors fill the file.
    Raise `CheckpointError` if they do not.
    """
    try:
        check_regular(path)
        path.open("rb").close()  # its error says more than the library's
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {explain(error)}") from error
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_slice(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({describe_error(error)}); download or "
            "convert it again"
        ) from error


def read_tensors(folder: Path) -> dict[str, mx.array]:
    """Read all tensors of a folder, after a check of their headers; see `read_shapes`."""
    read_shapes(folder)
    tensors: dict[str, mx.array] = {}
    for path in weight_files(folder):
        try:
            tensors.update(mx.load(str(path)))  # type: ignore[arg-type]
        except RuntimeError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of a folder by name; raise `CheckpointError` if there are none."""
    for pattern in WEIGHTS_PATTERNS:
        if paths := sorted(folder.glob(pattern)):
            return paths
    raise CheckpointError(f"no {WEIGHTS_PATTERNS[0]} in {folder}{_explain(folder)}")


def _explain(folder: Path) -> str:
    from mlx_redrafter.hub import explain_files

    return explain_files([path.name for path in folder.iterdir()] if folder.is_dir() else [])


def has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS_PATTERNS)


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, mx.array], framework: str = "mlx"
) -> None:
    """Write ``config.json`` and ``model.safetensors``; each file appears whole or not at all.

    The config comes last, so that a folder with a config has its weights. The header names
    ``framework`` as the format of the tensors. Blocks until MLX has computed them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / WEIGHTS_FILE,
        lambda path: mx.save_safetensors(str(path), dict(tensors), metadata={"format": framework}),
    )
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def named_parameters(module: nn.Module) -> dict[str, mx.array]:
    """Return all arrays of a module by their dotted names."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())))


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8; the file appears whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path next to ``path``, then move the result into place.

    The temporary name keeps the suffix, because some writers require it. Its content is on the disk
    before the move, so that a power cut leaves the earlier file or the new one; after the call it
    leaves the new one. An `OSError` names ``path``.
    """
    temporary = path.with_name(f"{UNFINISHED}{secrets.token_hex(4)}{path.suffix}")
    with naming(path):
        temporary.touch(exist_ok=False)  # readable for others as the user's umask says
        try:
            write(temporary)
            _flush(temporary)
            os.replace(temporary, path)
            flush_names(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _flush(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk.

    On macOS, fsync leaves them in the cache of the drive, and some file systems refuse more.
    """
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    handle = os.open(path, os.O_RDONLY)
    try:
        if full_sync is not None:
            with suppress(OSError):
                fcntl.fcntl(handle, full_sync)
                return
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_names(folder: Path) -> None:
    """Wait until moves into a folder are on the disk, if its file system can tell."""
    with suppress(OSError):
        _flush(folder)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors about temporary files, MLX's too, name ``path`` instead."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a library's error, with a message of its own
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except RuntimeError as error:  # MLX's only kind of error
        raise OSError(errno.EIO, first_line(error), str(path)) from error
