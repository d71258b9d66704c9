"""Repositories on the Hugging Face Hub: size and licence before a download, and the download."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from mlx_redrafter.checkpoints.cards import Card
from mlx_redrafter.errors import CheckpointError, ResourceError, first_line
from mlx_redrafter.memory_sizes import format_bytes


class Repository(NamedTuple):
    """A repository, as the hub describes it.

    Attributes:
        sizes: Sizes of its files in bytes, by name.
        is_gated: Whether its owner must accept the user first.
    """

    name: str
    sizes: dict[str, int]
    card: Card
    is_gated: bool

    @property
    def address(self) -> str:
        """Address of its page."""
        return f"{constants.ENDPOINT}/{self.name}"

    def size(self, patterns: Sequence[str]) -> int:
        """Return the size in bytes of the files that match a pattern."""
        sizes = self.sizes.items()
        return sum(size for name, size in sizes if any(fnmatch(name, one) for one in patterns))


def describe_repository(name: str) -> Repository | None:
    """Ask the hub about a repository; None if there is none of this name.

    Raises:
        CheckpointError: The hub cannot be reached, or the name is not one of a repository.
    """
    try:
        info = HfApi().model_info(name, files_metadata=True)
    except RepositoryNotFoundError:
        return None
    except Exception as error:  # the hub's libraries raise exceptions of many kinds
        raise CheckpointError(
            f"cannot reach {name!r} on the Hugging Face Hub ({first_line(error)}); check the name "
            "and the network"
        ) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    card = Card.of({} if info.card_data is None else info.card_data.to_dict())
    return Repository(name, sizes, card, bool(info.gated))


def download(repository: Repository, patterns: Sequence[str]) -> Path:
    """Download the files of a repository that match a pattern, and return their folder.

    Raises:
        CheckpointError: The download fails.
        ResourceError: The disk is too small.
    """
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.absolute().parents) if os.path.exists(path))
    needed, free = repository.size(patterns), shutil.disk_usage(existing).free
    if needed > free:
        raise ResourceError(
            f"{repository.name} needs {format_bytes(needed)} of disk in {cache}, found "
            f"{format_bytes(free)} free; free some, or set HF_HOME to a folder on another disk"
        )
    try:
        return Path(snapshot_download(repository.name, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's libraries raise exceptions of many kinds
        gate = f"; accept its terms at {repository.address} first"
        raise CheckpointError(
            f"cannot download {repository.name} ({first_line(error)})"
            + (gate if repository.is_gated else "; try again, which continues the download")
        ) from error
