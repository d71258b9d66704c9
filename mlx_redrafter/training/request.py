"""The request of a training run, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.fit import TOP_TOKENS
from mlx_redrafter.training.state import has_state
from mlx_redrafter.training.training_options import (
    READING_CONTEXT,
    DataOptions,
    LossOptions,
    NetworkOptions,
    TrainingOptions,
    check_dtype,
)

STATE_FOLDER, CACHE_FOLDER = "state", "cache"


@dataclass(frozen=True)
class TrainingRequest:
    """The files, models and options of a training run.

    Attributes:
        model: Folder or hub repository of the target.
        out: Folder of the drafter.
        data: Files of texts, chats or prompts.
        prompts: Files of prompts.
        cache: Folder of the teacher cache, by default inside ``out``. Runs with the same target,
            files and data options may share a cache.
        adapter_path: LoRA adapter of the target.
        trust_remote_code: Whether to run code from the target's checkpoint.
        start_from: Folder or hub repository of a drafter to continue training, made for this or a
            similar target, whose shape is kept; None for a new drafter.
        top_k: Number of next tokens whose probabilities are cached. The cache of held-out texts,
            which calibrate the drafter, keeps at least `TOP_TOKENS`.
        dtype: Dtype of the written weights.
        resume: Whether to continue a run that was begun in ``out``.
        dry_run: Whether to stop before anything is written, once time, disk and memory are known.
        data_options: Options of the texts.
        network: Shape of a new drafter, and the beam length.
        loss: Training objective.
        training: Options of the optimisation.
    """

    model: str
    out: Path
    data: Sequence[Path] = ()
    prompts: Sequence[Path] = ()
    cache: Path | None = None
    adapter_path: Path | None = None
    trust_remote_code: bool = False
    start_from: str | None = None
    top_k: int = 32
    dtype: str = "float16"
    resume: bool = False
    dry_run: bool = False
    data_options: DataOptions = field(default_factory=DataOptions)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if not self.data and not self.prompts:
            raise ConfigError("expected files, found nothing to train on; give --data or --prompts")
        if has_state(self.out / STATE_FOLDER) and not self.resume:
            raise ConfigError(
                f"a run was begun in {self.out}; go on with --resume, or choose another --out"
            )
        head = self.network.head
        if self.start_from is not None and head != "redrafter":
            raise ConfigError(f"a head {head} begins anew; leave start_from out")
        if self.loss.recipe == "rollouts" and head in READING_CONTEXT:
            raise ConfigError(
                f"rollouts are no part of the text that the head {head} attends to; use another "
                "recipe"
            )
        if self.start_from is not None and self.network != NetworkOptions(
            beam_length=self.network.beam_length
        ):
            raise ConfigError(
                f"the drafter {self.start_from} keeps its shape: leave exit_dim, layers and "
                "draft_vocab out"
            )

    @property
    def cache_folder(self) -> Path:
        """Folder of the teacher cache."""
        return self.cache or self.out / CACHE_FOLDER

    @property
    def held_out_top_k(self) -> int:
        """Number of next tokens cached for held-out texts."""
        return max(self.top_k, TOP_TOKENS)
