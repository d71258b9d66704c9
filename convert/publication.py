"""Publication of a result: a folder that appears whole or not at all, and its upload."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi

from mlx_redrafter.checkpoint_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    flush_names,
    naming,
    read_config,
)
from mlx_redrafter.checkpoints.cards import CARD_FILE
from mlx_redrafter.destinations import FINDER, check_destination
from mlx_redrafter.errors import CheckpointError, describe_error

# Key in config.json for the provenance of the weights; it marks a folder as an output.
PROVENANCE_KEY = "conversion"
_OUTPUT_FILES = {CONFIG_FILE, WEIGHTS_FILE, CARD_FILE}


def check_output(destination: Path, *inputs: str | Path | None, overwrite: bool = False) -> None:
    """Raise `ConfigError` unless an output may be written to ``destination``.

    It may be absent, empty, or hold nothing but an earlier output, never an input; ``overwrite``
    allows other files beside the output.
    """
    is_own = _holds_output_alone(destination) and PROVENANCE_KEY in read_config(destination)
    check_destination(destination, inputs, is_own, overwrite)


def _holds_output_alone(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return CONFIG_FILE in names and names - {FINDER} <= _OUTPUT_FILES


@contextmanager
def publish(destination: Path) -> Iterator[Path]:
    """Yield a new folder to fill, which replaces ``destination`` unless filling it fails.

    Files of others in ``destination`` stay there.
    """
    destination = destination.resolve()
    with naming(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging = _make_beside(destination)
        try:
            yield staging
            staging.chmod(0o755)  # mkdtemp makes it private
            _move(staging, destination)
            flush_names(destination.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def upload_folder(folder: Path, repo: str) -> str:
    """Upload a folder with the user's credentials to a repository, new or not; return its URL."""
    api = HfApi()
    try:
        address = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
    except Exception as error:  # the hub's libraries raise exceptions of many kinds
        raise CheckpointError(
            f"{folder} is complete but could not be uploaded to {repo!r}: {describe_error(error)}; "
            "check the name, the network and `hf auth login`, then `hf upload`"
        ) from error
    return str(address)


def _move(staging: Path, destination: Path) -> None:
    if not destination.exists():
        os.rename(staging, destination)
        return
    if any(destination.iterdir()) and not _holds_output_alone(destination):
        # The config comes last, as in `write_checkpoint`.
        for path in sorted(staging.iterdir(), key=lambda path: path.name == CONFIG_FILE):
            os.replace(path, destination / path.name)
        return
    earlier = _make_beside(destination)
    os.rename(destination, earlier)  # onto an empty folder
    try:
        os.rename(staging, destination)
    except BaseException:
        os.rename(earlier, destination)
        raise
    shutil.rmtree(earlier)


def _make_beside(destination: Path) -> Path:
    # The name of the destination with a suffix may be too long for the file system.
    prefix = f".{destination.name[:32]}."
    return Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))
