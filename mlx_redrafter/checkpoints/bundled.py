"""The bundled weights: a small target with its drafter, and drafters of published models.

The cards in their folders describe training data and quality.
"""

from pathlib import Path
from typing import Literal

from mlx_redrafter.checkpoint_files import CONFIG_FILE, expand_home, shared_name
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.model_store import find_stored

FOLDER = Path(__file__).resolve().parent.parent / "pair"
# Folder of the drafters of published models, a folder each.
DRAFTERS = FOLDER.parent / "drafters"


def find_bundled(part: Literal["target", "drafter"]) -> Path:
    """Return the checkpoint folder of one part of the pair."""
    folder = FOLDER / part
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"expected the bundled {part} in {folder}, found none; install mlx-redrafter again, or "
            "name a model and a drafter of your own"
        )
    return folder


def local_folder(model: str | None) -> Path | None:
    """Return the folder of a model if it is on this machine, that of the bundled one for None."""
    if model is None:
        return find_bundled("target")
    folder = expand_home(model)
    return folder if folder.is_dir() else find_stored(model, None)


def checkpoint_name(path_or_repo: str | None) -> str:
    """Return a name to publish, "bundled" for None; see `shared_name`."""
    return "bundled" if path_or_repo is None else shared_name(path_or_repo)


def bundled_drafters() -> list[Path]:
    return sorted(config.parent for config in DRAFTERS.glob(f"*/{CONFIG_FILE}"))


def expand_name(drafter: str) -> str:
    """Return the folder of a drafter of the package by its name; other names stay as they are.

    A folder here that has the name comes first.
    """
    named = next((folder for folder in bundled_drafters() if folder.name == drafter), None)
    return drafter if named is None or Path(drafter).is_dir() else str(named)
