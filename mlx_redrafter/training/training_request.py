"""The request of a training run: files, models and options, checked before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mlx_redrafter.destinations import check_destination
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.training.state import has_state
from mlx_redrafter.training.teacher_cache import MANIFEST
from mlx_redrafter.training_options import DataOptions, NetworkOptions, TrainingOptions

# File in the drafter's folder with the options that a run of the command line began with.
RUN_FILE = "run.json"
# Folder of the training state, inside the drafter's folder.
STATE_FOLDER = "state"
# Folder of the teacher cache, inside the drafter's folder unless the request names another.
CACHE_FOLDER = "cache"


@dataclass(frozen=True)
class TrainingRequest:
    """The files, models and options of a training run.

    Attributes:
        data: Files of texts, chats or prompts; without ``data`` and ``prompts``, the target writes
            the prompts itself.
        cache: Folder of the teacher cache, by default inside ``out``; runs with the same target,
            files and data options may share it.
        trust_remote_code: Whether to run code from the target's checkpoint.
        dry_run: Whether to stop before anything is written, once time, disk and memory are known.
        overwrite: Whether ``out`` and ``cache`` may hold files that no training wrote.
        network: Shape of a new drafter, or an earlier drafter.
    """

    model: str
    out: Path
    data: Sequence[Path] = ()
    prompts: Sequence[Path] = ()
    cache: Path | None = None
    adapter_path: Path | None = None
    trust_remote_code: bool = False
    resume: bool = False
    dry_run: bool = False
    overwrite: bool = False
    data_options: DataOptions = field(default_factory=DataOptions)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def check_output(self) -> None:
        """Raise `ConfigError` if the run would write over an input, another run or other files."""
        if self.is_begun and not self.resume:
            raise ConfigError(
                f"a run was begun in {self.out}; continue it with --resume, or choose another --out"
            )
        if self.cache is not None and self.cache.resolve() in self.out.resolve().parents:
            raise ConfigError(
                f"expected a cache that does not hold --out, found {self.cache}; choose another"
            )
        inputs = [self.model, self.adapter_path, self.network.start_from, *self.data, *self.prompts]
        has_cache = (self.cache_folder / MANIFEST).exists()
        check_destination(self.out, inputs, self.is_begun, self.overwrite)
        check_destination(self.cache_folder, inputs, has_cache, self.overwrite)

    @property
    def is_begun(self) -> bool:
        return has_state(self.state_folder) or any(
            (self.out / name).exists() for name in (RUN_FILE, f"{CACHE_FOLDER}/{MANIFEST}")
        )

    @property
    def state_folder(self) -> Path:
        return self.out / STATE_FOLDER

    @property
    def cache_folder(self) -> Path:
        return self.cache or self.out / CACHE_FOLDER


class Reporter(Protocol):
    """Receiver of progress and messages; a KeyboardInterrupt from `progress` stops the run."""

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """Report that ``done`` of ``total`` tokens or steps of a stage are done."""

    def say(self, message: str) -> None:
        """Report a message of one line."""
