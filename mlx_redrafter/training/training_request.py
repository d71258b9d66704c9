"""The request of a training run: files, models and options, checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from mlx_redrafter.checks import check_int, is_number
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.training.state import has_state

Recipe = Literal["soft", "coupled", "overlap", "apple"]
RECIPES: tuple[Recipe, ...] = ("soft", "coupled", "overlap", "apple")
Head = Literal[
    "redrafter", "medusa", "eagle", "eagle1", "mtp", "specformer", "dflash", "dflash2", "dspark"
]
# Kinds of heads, with the options that each kind has as well as the beam length.
HEADS: Mapping[Head, tuple[str, ...]] = {
    "redrafter": ("exit_dim", "layers", "draft_vocab"),
    "medusa": ("layers", "draft_vocab"),
    "eagle": ("draft_vocab",),
    "eagle1": (),
    "mtp": (),
    "specformer": (),
    "dflash": ("layers",),
    "dflash2": ("layers",),
    "dspark": ("layers",),
}
# Heads that are block drafters.
BLOCK_HEADS: tuple[Head, ...] = ("dflash", "dflash2", "dspark")
# Heads that training can continue from an earlier drafter.
CONTINUED: tuple[Head, ...] = ("redrafter", *BLOCK_HEADS)
# Folder of the training state, inside the drafter's folder.
STATE_FOLDER = "state"
# Folder of the teacher cache, inside the drafter's folder unless the request names another.
CACHE_FOLDER = "cache"


@dataclass(frozen=True)
class DataOptions:
    """Options of the texts to train on.

    Attributes:
        max_tokens: Maximum number of tokens to train on, None for all texts.
        sequence_length: Maximum length of a sequence, in tokens; longer texts are cut.
        self_generated_share: Share of the tokens that the target generates, 0 to 1.
        answer_tokens: Maximum length of a self-generated text, in tokens.
        temp: Sampling temperature of half of the self-generated texts; the other half is greedy.
        held_out: Number of self-generated texts that only measure tokens per step.
        seed: Random seed for the choice of texts and for sampling.
    """

    max_tokens: int | None = None
    sequence_length: int = 512
    self_generated_share: float = 0.5
    answer_tokens: int = 256
    temp: float = 0.8
    held_out: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_int("tokens", self.max_tokens, 1)
        check_int("sequence_length", self.sequence_length, 16)
        check_int("answer_tokens", self.answer_tokens, 8)
        check_int("held_out", self.held_out, 1)
        check_int("seed", self.seed, 0, 2**31 - 1)
        check_number("self_generated", self.self_generated_share, 0, 1)
        check_number("temp", self.temp, 0, 100)


@dataclass(frozen=True)
class NetworkOptions:
    """Shape of the drafter; the defaults suit small and large targets.

    Attributes:
        head: Kind of the drafter: a recurrent one, Medusa heads, EAGLE-3, EAGLE-1, an MTP module in
            MiMo's format, a SpecFormer, or a block drafter.
        exit_dim: Width of the head; by default 1024, or twice the hidden size if that is less.
        num_layers: Number of residual blocks before the head; by default 2, of Medusa heads 1. Of
            a block drafter the number of decoder layers.
        beam_length: L, root included; training unrolls the drafter ``L - 1`` steps.
        draft_vocab: Number of tokens that the drafter can propose, the most frequent ones of the
            texts; None for all. With large vocabularies the head is most of the cost of a draft.
    """

    head: Head = "redrafter"
    exit_dim: int | None = None
    num_layers: int | None = None
    beam_length: int = 5
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ConfigError(f"head must be one of {', '.join(HEADS)}, got {self.head!r}")
        given = {
            "exit_dim": self.exit_dim,
            "layers": self.num_layers,
            "draft_vocab": self.draft_vocab,
        }
        for name, value in given.items():
            if value is not None and name not in HEADS[self.head]:
                raise ConfigError(f"{name} has no meaning for the head {self.head}; leave it out")
        if self.draft_vocab is not None:
            check_int("draft_vocab", self.draft_vocab, 1)
        if self.exit_dim is not None:
            check_int("exit_dim", self.exit_dim, 1)
        if self.num_layers is not None:
            check_int("layers", self.num_layers, 0, 16)
        check_int("length", self.beam_length, 2, MAX_BEAM_LENGTH, " (the root counts as one)")


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the optimisation.

    Attributes:
        epochs: Number of passes over the text.
        minutes: Approximate time of the whole run, replaces ``epochs``: training may use the time
            that generating, reading and evaluation leave.
        batch_tokens: Positions per optimiser step.
        learning_rate: Peak of the schedule, which is a linear warm-up, then a cosine to a hundredth
            of the peak; None for `Student.learning_rate`.
        num_evaluations: Number of measurements of tokens per step over the whole run; fewer in
            short runs.
        patience: Number of measurements without improvement, in the second half of the run, that
            stops training.
        checkpoint_seconds: Maximum time between checkpoints, in seconds; 0 writes one after every
            step.
        seed: Random seed for the initial weights and the order of the positions.
    """

    epochs: int = 3
    minutes: float | None = None
    batch_tokens: int = 1024
    learning_rate: float | None = None
    num_evaluations: int = 20
    patience: int = 5
    checkpoint_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("epochs", self.epochs, 1)
        check_int("batch_tokens", self.batch_tokens, 1)
        check_int("num_evaluations", self.num_evaluations, 1)
        check_int("patience", self.patience, 1)
        check_int("seed", self.seed, 0, 2**31 - 1)
        if self.minutes is not None:
            check_number("minutes", self.minutes, 0, 1e6)
        if self.learning_rate is not None:
            check_number("lr", self.learning_rate, 0, 10)
        check_number("checkpoint_seconds", self.checkpoint_seconds, 0, math.inf)


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
        start_from: Folder or hub repository of a recurrent or block drafter to continue training,
            made for this or a similar target; the new drafter has its shape. None for a new one.
        resume: Whether to continue a run that was begun in ``out``.
        dry_run: Whether to stop before anything is written, once time, disk and memory are known.
        data_options: Options of the texts.
        network: Shape of a new drafter, and the beam length.
        recipe: Training objective. "soft": KL divergence from the target's distributions, from one
            pass over the text. "coupled": probability of sampling the target's token with the same
            Gumbel noise, from the same pass. "overlap": DSpark's, a total variation and some
            cross-entropy. "apple": cross-entropy on the text, as in Apple's released code.
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
    resume: bool = False
    dry_run: bool = False
    data_options: DataOptions = field(default_factory=DataOptions)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    recipe: Recipe = "soft"
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ConfigError(f"recipe must be one of {', '.join(RECIPES)}, got {self.recipe!r}")
        if not self.data and not self.prompts:
            raise ConfigError("expected files, found nothing to train on; give --data or --prompts")
        if has_state(self.state_folder) and not self.resume:
            raise ConfigError(
                f"a run was begun in {self.out}; continue it with --resume, or choose another --out"
            )
        if self.start_from is None:
            return
        head = self.network.head
        if head not in CONTINUED:
            raise ConfigError(
                f"training can start from a recurrent or block drafter only, got the head {head}; "
                "leave --start-from out"
            )
        if self.network != NetworkOptions(head, beam_length=self.network.beam_length):
            raise ConfigError(
                f"the drafter {self.start_from} keeps its shape; leave --exit-dim and "
                "--draft-vocab out"
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
        ...

    def say(self, message: str) -> None:
        """Report a message of one line."""
        ...


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise `ConfigError` unless ``value`` is a number in ``[low, high]``."""
    if not is_number(value) or not low <= value <= high:  # type: ignore[operator]
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
