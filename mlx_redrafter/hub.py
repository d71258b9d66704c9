"""Repositories on the Hugging Face Hub: their files and licence, and the download.

A repository is described first, so that nothing is downloaded that cannot be used.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import tqdm

from mlx_redrafter.errors import CheckpointError, ResourceError, first_line
from mlx_redrafter.interrupts import keeping
from mlx_redrafter.memory_sizes import format_bytes
from mlx_redrafter.model_store import CONFIG, WEIGHTS, cached_repository, stored_models

# Minimum number of bytes of a download whose progress is shown.
MIN_SHOWN = 10**6
# Names of files that are being downloaded.
PARTS = "*.incomplete"
# Progress of a download, in the words of tqdm.
PROGRESS = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left"
# Maximum number of repositories that each of two searches for a similar name returns.
MAX_SIMILAR = 100
# Files that are not a model in MLX's format: a pattern of their names, their description, and the
# remedy. The first pattern that matches counts.
OTHER_FORMATS = (
    ("model*.safetensors", "weights alone", "copy the other files of its repository, too"),
    ("*.gguf", "GGUF files", "use a copy in MLX's format, such as one of mlx-community"),
    (
        "adapter*.safetensors",
        "an adapter",
        "redrafter-mlx pull downloads it; give its folder with --adapter-path next to --model",
    ),
    ("*.safetensors", "safetensors of another format", "use a language model in mlx-lm's format"),
    (
        "*.bin",
        "PyTorch's weights",
        "use a copy in safetensors; redrafter-mlx convert reads those of drafters",
    ),
)


@contextmanager
def _bars(size: int) -> Iterator[type[tqdm]]:
    """Yield a class of progress bars, of which the one that counts written bytes is shown.

    Small downloads have none. The hub leaves bars open: the next output would be on their line.
    """
    opened: list[tqdm] = []

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            counts_bytes = options.get("unit") == "B" and "transfer" not in str(options.get("name"))
            if size < MIN_SHOWN or not counts_bytes:
                options["disable"] = True
            super().__init__(*args, **options | {"bar_format": PROGRESS})
            opened.append(self)

    try:
        yield Bar
    finally:
        for bar in opened:
            bar.close()


class Repository(NamedTuple):
    """A repository, as the hub describes it.

    ``sizes`` are in bytes, by the names of its files. ``licence`` is empty if the card gives none,
    and ``is_gated`` is whether its owner must accept the user first.
    """

    name: str
    sizes: dict[str, int]
    licence: str
    is_gated: bool

    @property
    def address(self) -> str:
        return f"{constants.ENDPOINT}/{self.name}"

    def size(self, patterns: Sequence[str]) -> int:
        return sum(size for name, size in self.sizes.items() if _matches(name, patterns))


def describe_repository(name: str, target: str = "") -> Repository | None:
    """Ask the hub about a repository, or the drafter of a target; None if there is none.

    Raise `CheckpointError` if the hub cannot be reached, or the name is not one of a repository.
    """
    try:
        info = HfApi().model_info(name, files_metadata=True)
    except RepositoryNotFoundError:
        return None
    except Exception as error:  # the hub's libraries raise exceptions of many kinds
        similar = _most_similar(name, [model.name for model in stored_models()], target)
        hint = "check the name and the network, or give a folder"
        hint = f"did you mean {similar}, which is on this machine?" if similar else hint
        raise CheckpointError(
            f"{name!r} is neither a local folder nor a repository that can be reached on the "
            f"Hugging Face Hub ({first_line(error)}); {hint}"
        ) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    card = {} if info.card_data is None else info.card_data.to_dict()
    return Repository(name, sizes, _licence(card), bool(info.gated))


def find_repository(
    name: str, patterns: Sequence[str] | None = None, target: str = ""
) -> Repository:
    """Describe a repository that must have the files that the patterns name.

    That is ``config.json`` if it is a pattern, and a file of weights if patterns of them are given.
    Otherwise raise `CheckpointError`, which suggests a similar name, but to a drafter's never that
    of its target.
    """
    repository = describe_repository(name, target)
    if repository is None:
        similar = _most_similar(name, _names_like(name), target)
        hint = f"did you mean {similar}?" if similar else "check the name;"
        raise CheckpointError(
            f"there is no {name!r} on this machine or on the hub; {hint} `hf auth login` shows "
            "private ones"
        )
    names = repository.sizes
    weights = [pattern for pattern in patterns or () if pattern.endswith(WEIGHTS)]
    config = [CONFIG] if CONFIG in (patterns or ()) else []
    for wanted in (weights, config):
        if wanted and not any(_matches(file, wanted) for file in names):
            raise CheckpointError(f"no {wanted[0]} in {name}{explain_files(names)}")
    return repository


def explain_files(names: Collection[str]) -> str:
    """Say what files hold instead of a model in MLX's format, and what to do."""
    for pattern, found, remedy in OTHER_FORMATS:
        if any(fnmatch(name, pattern) for name in names):
            return f": found {found}; {remedy}"
    return "; is it a checkpoint folder?"


def download(repository: Repository, patterns: Sequence[str] | None) -> Path:
    """Download the files of a repository that match a pattern, and return their folder.

    Raise `CheckpointError` if that fails, or `ResourceError` if the disk is too small.
    """
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.absolute().parents) if os.path.exists(path))
    needed, free = repository.size(patterns or ["*"]), shutil.disk_usage(existing).free
    if needed > free:
        raise ResourceError(
            f"{repository.name} needs {format_bytes(needed)} of disk in {cache}, found "
            f"{format_bytes(free)} free; free some, or set HF_HOME to a folder on another disk"
        )
    try:
        allowed = None if patterns is None else list(patterns)
        with keeping(_end_download(repository)), _bars(needed) as bar:
            return Path(snapshot_download(repository.name, allow_patterns=allowed, tqdm_class=bar))
    except GatedRepoError as error:
        raise CheckpointError(
            f"the owner of {repository.name} gives it to known users only: accept the terms at "
            f"{repository.address}, then run `hf auth login`"
        ) from error
    except Exception as error:  # the hub's libraries raise exceptions of many kinds
        raise CheckpointError(
            f"cannot download {repository.name} ({first_line(error)}); try again, which downloads "
            "the missing files"
        ) from error


def _end_download(repository: Repository) -> Callable[[], str]:
    """Return what is to be done and said at Ctrl-C: its client continues no file."""
    folder = cached_repository(repository.name) / "blobs"
    before = {*folder.glob(PARTS)}

    def end() -> str:
        for part in {*folder.glob(PARTS)} - before:
            part.unlink(missing_ok=True)
        return "stopped; complete files are kept, and the same command downloads the others"

    return end


def fetch(name: str, patterns: Sequence[str] | None, target: str = "") -> Path:
    return download(find_repository(name, patterns, target), patterns)


def _most_similar(name: str, known: Sequence[str], target: str) -> str | None:
    """Return the other name that is most like a wrong one as a whole, or else in its last part."""
    known = [one for one in known if one not in (name, target)]
    found = get_close_matches(name, known, n=1)
    if not found:
        last_parts = {one.rpartition("/")[2].lower(): one for one in known}
        last = get_close_matches(name.rpartition("/")[2].lower(), list(last_parts), n=1)
        found = [last_parts[one] for one in last]
    return found[0] if found else None


def _names_like(name: str) -> list[str]:
    """List repositories on this machine, and those of the hub of which a part is the same."""
    owner, _, last = name.partition("/")
    names = [model.name for model in stored_models()]
    beginning = re.split(r"[-_.]", last)[0]
    with suppress(Exception):  # a suggestion is not worth an error
        for options in ({"search": last}, {"author": owner, "search": beginning}):
            found = HfApi().list_models(limit=MAX_SIMILAR, **options)
            names += [model.id for model in islice(found, MAX_SIMILAR)]
    return names


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _licence(card: dict[str, Any]) -> str:
    licence = card.get("license")
    if licence == "other" and isinstance(card.get("license_name"), str):
        licence = card["license_name"]
    return licence if isinstance(licence, str) else ""
