"""Publication of a result: a folder that appears whole or not at all, and its upload."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi

from mlx_redrafter.checkpoint_files import (
    CONFIG_FILE,
    INCOMPLETE,
    UNFINISHED,
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
    names = os.listdir(folder) if folder.is_dir() else []
    counted = {one for one in names if one != FINDER and not INCOMPLETE.fullmatch(one)}
    return CONFIG_FILE in counted and counted <= _OUTPUT_FILES


@contextmanager
def publish(destination: Path) -> Iterator[Path]:
    """Yield a new folder to fill, whose files replace an earlier output unless filling it fails.

    Files of others in ``destination`` stay there.
    """
    destination = destination.resolve()
    with naming(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        replaced = sorted(_OUTPUT_FILES) if _holds_output_alone(destination) else []
        # An existing folder stays: it may be a disk of its own, or the one that a shell is in.
        home = destination if destination.is_dir() else destination.parent
        work = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=home))
        try:
            staging, earlier = work / "new", work / "earlier"
            staging.mkdir()
            earlier.mkdir()
            yield staging
            if home == destination:
                new = sorted(path.name for path in staging.iterdir())
                moves = [(destination / name, earlier / name) for name in replaced or new]
                # The weights come before the config, as in `write_checkpoint`.
                moves += [(staging / name, destination / name) for name in reversed(new)]
                _move([pair for pair in moves if pair[0].exists()])
            else:
                os.rename(staging, destination)
            flush_names(home)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _move(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Move files; if that fails, move all back."""
    done: list[tuple[Path, Path]] = []
    try:
        for source, place in pairs:
            os.rename(source, place)
            done.append((place, source))
    except BaseException:
        for place, source in reversed(done):
            os.rename(place, source)
        raise


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
