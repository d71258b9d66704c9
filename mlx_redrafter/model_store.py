"""Checkpoints stored on this machine: the Hugging Face cache and LM Studio's folders.

mlx-lm keeps its downloads in the Hugging Face cache. Nothing here uses the network, or reads
weights.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants

from mlx_redrafter.errors import CheckpointError

CONFIG = "config.json"
# Endings of files with weights.
WEIGHTS = (".safetensors", ".bin", ".pt")
# Number and count in the name of a file that holds a part of the weights.
SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.\w+")
# Beginning of a model's folder in the Hugging Face cache.
CACHED = "models--"
# Maximum size of LM Studio's settings, in bytes; they are a few kilobytes.
MAX_SETTINGS = 2**20


class StoredModel(NamedTuple):
    """A model or drafter on this machine: a repository such as ``org/name``, and its folder.

    ``place`` names the program that keeps it.
    """

    name: str
    folder: Path
    place: str

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def stored_models() -> list[StoredModel]:
    """List the models on this machine whose weights are complete, in order of their names."""
    cache = Path(constants.HF_HUB_CACHE)
    cached = [_repository(folder.name) for folder in cache.glob(f"{CACHED}*--*")]
    found = [*(model for name in cached for model in _cached(name, [CONFIG])), *_of_lm_studio()]
    found = [model for model in found if is_complete(model.folder, None)]
    return sorted(found, key=lambda model: (model.name.lower(), model.place))


def stored_names() -> list[str]:
    """List the names of models that are or were on this machine, which takes no time."""
    cached = Path(constants.HF_HUB_CACHE).glob(f"{CACHED}*--*/snapshots/*/{CONFIG}")
    names = {_repository(config.parents[2].name) for config in cached}
    return sorted(names | {model.name for model in _of_lm_studio()})


def find_stored(name: str, patterns: Sequence[str] | None) -> Path | None:
    """Return the folder of a repository on this machine if the files asked for are in it.

    ``name`` may be its last part: raise `CheckpointError` if several end so. ``patterns`` are shell
    patterns of the files; None for all.
    """
    if "/" not in name:
        names = [model.name for model in stored_models()]
        same = {one for one in names if one.lower().rpartition("/")[2] == name.lower()}
        if len(same) > 1:
            raise CheckpointError(
                f"{name!r} is the name of several repositories on this machine: "
                f"{', '.join(sorted(same))}; give one of them"
            )
        if not same:
            return None
        name = same.pop()
    for model in (*_cached(name, patterns), *_of_lm_studio()):
        if model.name.lower() == name.lower() and is_complete(model.folder, patterns):
            return model.folder
    return None


def is_path(name: str) -> bool:
    """Return True if a name is that of a folder, not of a repository or its last part."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def cached_repository(name: str) -> Path:
    """Return the folder that a repository has in the Hugging Face cache, or would have.

    As on the hub, upper and lower case are the same.
    """
    cache, own = Path(constants.HF_HUB_CACHE), f"{CACHED}{name.replace('/', '--')}"
    same = [one for one in cache.glob(f"{CACHED}*--*") if one.name.lower() == own.lower()]
    return same[0] if same and cache / own not in same else cache / own


def repository_of(folder: Path) -> str:
    """Name the repository of a folder or a link in one of the stores; for others the folder's name.

    A link to a folder in a store has the name of that one.
    """
    homes, resolved = [home.resolve() for home in _lm_studio_folders()], folder.resolve()
    for path in (resolved, folder.absolute()):
        for parent in path.parents:
            if parent.name.startswith(CACHED):
                return _repository(parent.name)
        if path.parent.parent.resolve() in homes:
            return f"{path.parent.name}/{path.name}"
    return resolved.name


def is_complete(folder: Path, patterns: Sequence[str] | None) -> bool:
    """Return whether a folder has a config and, if asked for, weights without missing parts."""
    names = {file.name for file in folder.iterdir() if file.is_file()} if folder.is_dir() else set()
    wanted = [f"*{ending}" for ending in WEIGHTS]
    if patterns is not None:
        wanted = [pattern for pattern in patterns if pattern.endswith(WEIGHTS)]
    weights = {name for name in names if any(fnmatch(name, pattern) for pattern in wanted)}
    if CONFIG not in names or (wanted and not weights):
        return False
    literal = {pattern for pattern in wanted if not set(pattern) & set("*?[")}
    if literal == set(wanted):
        return literal <= names
    shards = [match.groups() for match in map(SHARD.fullmatch, weights) if match is not None]
    found = Counter(name for name, _ in shards)
    return all(found[name] == int(count) for name, count in shards)


def _cached(repository: str, patterns: Sequence[str] | None) -> Iterator[StoredModel]:
    """Find the newest snapshot of a repository in the Hugging Face cache.

    It is left out if files are missing that the hub has listed and that match the patterns.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    allowed = None if patterns is None else list(patterns)
    repository = _repository(cached_repository(repository).name)
    with suppress(LocalEntryNotFoundError, HFValidationError):
        folder = snapshot_download(repository, allow_patterns=allowed, local_files_only=True)
        yield StoredModel(repository, Path(folder), "Hugging Face cache")


def _of_lm_studio() -> Iterator[StoredModel]:
    for home in _lm_studio_folders():
        for config in home.glob(f"*/*/{CONFIG}"):
            folder = config.parent
            yield StoredModel(f"{folder.parent.name}/{folder.name}", folder, "LM Studio")


def _lm_studio_folders() -> list[Path]:
    """Return the folders in which LM Studio keeps models: the defaults and the one in use."""
    home = Path.home()
    pointer = home / ".lmstudio-home-pointer"
    homes = [home / ".lmstudio", home / ".cache/lm-studio"]
    with suppress(ValueError):  # not a path: LM Studio would not find it either
        if pointer.is_file():
            homes.insert(0, Path(_read_start(pointer).strip()))
    folders = []
    for one in homes:
        folders += [Path(chosen) for chosen in _chosen_folder(one / "settings.json")]
        folders.append(one / "models")
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _chosen_folder(settings: Path) -> list[str]:
    try:
        values = json.loads(_read_start(settings)) if settings.is_file() else {}
    except (ValueError, RecursionError):
        return []
    chosen = values.get("downloadsFolder") if isinstance(values, dict) else None
    return [chosen] if isinstance(chosen, str) and chosen else []


def _read_start(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_SETTINGS).decode("utf-8", "replace")
    except OSError:
        return ""


def _repository(cache_name: str) -> str:
    return cache_name.removeprefix(CACHED).replace("--", "/", 1)
