"""Output folders, written atomically."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_redrafter.checkpoint_files import CONFIG_FILE, WEIGHTS_FILE, naming, read_config
from mlx_redrafter.errors import CheckpointError

CARD_FILE = "README.md"
# Key in config.json with the provenance of the weights, which marks a folder as an output.
PROVENANCE_KEY = "conversion"
_OUTPUT_FILES = {CONFIG_FILE, WEIGHTS_FILE, CARD_FILE}


def check_new(destination: Path, source: Path) -> None:
    """Raise `CheckpointError` unless ``destination`` is absent or empty, and not the source."""
    if _files_of(destination, source):
        raise CheckpointError(
            f"expected a new or an empty folder to write to, found files in {destination}"
        )


def check_destination(destination: Path, source: Path) -> None:
    """Raise `CheckpointError` unless an output may be written to ``destination``.

    The destination may be absent, empty, or hold nothing but an earlier output.
    """
    present = _files_of(destination, source)
    if present and not (
        present <= _OUTPUT_FILES and PROVENANCE_KEY in _read_config_if_present(destination)
    ):
        raise CheckpointError(
            f"expected a new or an empty folder to write to, found files that no conversion wrote "
            f"in {destination}"
        )


def _files_of(destination: Path, source: Path) -> set[str]:
    if destination.resolve() == source.resolve():
        raise CheckpointError(f"expected a new folder to write to, found the source: {destination}")
    if not destination.exists():
        return set()
    if not destination.is_dir():
        raise CheckpointError(f"expected a folder to write to, found a file: {destination}")
    return {path.name for path in destination.iterdir()}


@contextmanager
def publish(destination: Path) -> Iterator[Path]:
    """Yield a new folder to fill, which replaces ``destination`` unless filling it fails."""
    destination = destination.resolve()
    with naming(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging = _make_beside(destination)
        try:
            yield staging
            staging.chmod(0o755)  # mkdtemp makes it private
            _move(staging, destination)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _move(staging: Path, destination: Path) -> None:
    if not destination.exists():
        os.rename(staging, destination)
        return
    earlier = _make_beside(destination)
    os.rename(destination, earlier)  # onto an empty folder
    try:
        os.rename(staging, destination)
    except OSError:
        os.rename(earlier, destination)
        raise
    shutil.rmtree(earlier)


def _make_beside(destination: Path) -> Path:
    # A whole name and more may be too long.
    prefix = f".{destination.name[:32]}."
    return Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))


def _read_config_if_present(folder: Path) -> dict[str, object]:
    return read_config(folder) if (folder / CONFIG_FILE).is_file() else {}
