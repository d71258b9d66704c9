"""A checkpoint folder: its config and its tensors, in any of the supported formats."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_redrafter.checkpoint_files import (
    CONFIG_FILE,
    find_checkpoint,
    read_config,
    read_json,
    shared_name,
)
from mlx_redrafter.convert.stored import StoredTensor, read_safetensors_file
from mlx_redrafter.convert.torch_file import read_torch_file
from mlx_redrafter.errors import CheckpointError, explain, join_shortened, quote
from mlx_redrafter.proposers.checkpoint import TOKEN_IDS

# Weight files in order of preference.
_SINGLE_FILES = (
    "model.safetensors", "rank0.safetensors",  # TensorRT-LLM's
    "pytorch_model.bin", "model.pt", "medusa_lm_head.safetensors", "medusa_lm_head.pt",
)  # fmt: skip
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS = ["*.json", "*.safetensors", "*.bin", "*.pt"]
# Dtypes of weights that are converted.
READABLE = ("float32", "float16", "bfloat16")
# Dtypes of token ids.
READABLE_IDS = ("int32", "int64")


@dataclass(frozen=True)
class Source:
    """An opened checkpoint; the values of its tensors stay in the files until they are read.

    Attributes:
        name: Repository id, or the folder's name without its path.
        config: Object in ``config.json``; empty if there is no such file.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def check_dtypes(
        self, names: Mapping[str, str], remedy: str = "save the drafter in one of these dtypes"
    ) -> None:
        """Raise `CheckpointError` unless the dtypes of tensors can be read."""
        problems = []
        for own, name in names.items():
            dtype = self.tensors[name].dtype
            if dtype not in (READABLE_IDS if own == TOKEN_IDS else READABLE):
                problems.append(f"{quote(name)} is {dtype}")
        if problems:
            raise CheckpointError(
                f"expected {', '.join(READABLE)} (token ids: {' or '.join(READABLE_IDS)}), but "
                f"{join_shortened(problems)}; {remedy}"
            )

    def sha256(self) -> dict[str, str]:
        """SHA-256 of each weight file, by file name."""
        hashes = {}
        for path in self.files:
            with path.open("rb") as file:
                hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return hashes


def open_source(path_or_repo: str | Path) -> Source:
    """Open a checkpoint folder or a hub repository and read the headers of its weight files."""
    folder = find_checkpoint(path_or_repo, _PATTERNS)
    files, owners = _find_weight_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in read_file(path).items():
            if owners and owners.get(name) != path.name:
                raise CheckpointError(f"{path} holds {quote(name)}, which the index puts elsewhere")
            tensors[name] = tensor
    if missing := sorted(owners.keys() - tensors.keys()):
        names = join_shortened(map(quote, missing))
        raise CheckpointError(f"the index in {folder} names tensors that its files lack: {names}")
    config = read_config(folder) if (folder / CONFIG_FILE).exists() else {}
    return Source(shared_name(path_or_repo), folder, config, tuple(files), tensors)


def _find_weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Find the weight files, and the file name of each tensor in their index, if there is one."""
    if (folder / "rank1.safetensors").exists():
        raise CheckpointError(
            f"{folder} is a TensorRT-LLM checkpoint split over several ranks; "
            "build it again with --tp_size 1, or convert the drafter it was made from"
        )
    for name in _SINGLE_FILES:
        if (folder / name).is_file():
            return [folder / name], {}
    for name in _INDEX_FILES:
        if (folder / name).is_file():
            owners = _read_index(folder / name)
            return [folder / file for file in sorted(set(owners.values()))], owners
    raise CheckpointError(
        f"expected {', '.join(_SINGLE_FILES[:4])} or an index of shards in {folder}, found none"
    )


def _read_index(path: Path) -> dict[str, str]:
    owners = read_json(path).get("weight_map")
    if not isinstance(owners, dict) or not owners:
        raise CheckpointError(f"expected a weight_map in {path}, found none")
    for file in set(map(str, owners.values())):
        is_beside = Path(file).name == file and file.isprintable()
        if not is_beside or not (path.parent / file).is_file():
            raise CheckpointError(
                f"{path} names {quote(file)}, which is not a file in the same folder"
            )
    return {name: str(file) for name, file in owners.items()}


def read_file(path: Path) -> Mapping[str, StoredTensor]:
    """Read the tensors of a weight file, without their values."""
    if path.suffix == ".safetensors":
        return read_safetensors_file(path)
    try:
        return read_torch_file(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {explain(error)}") from error
