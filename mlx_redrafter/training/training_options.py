"""Options of a training run, one frozen dataclass per stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mlx_redrafter.checks import check_int
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.layer_sizes import check_captured_layers
from mlx_redrafter.target.target import FINAL

Recipe = Literal["soft", "coupled", "apple", "rollouts"]
RECIPES: tuple[Recipe, ...] = ("soft", "coupled", "apple", "rollouts")
# Recipes that train on the target's distributions; the others train on tokens.
DISTILLING: tuple[Recipe, ...] = ("soft", "coupled")
Head = Literal["redrafter", "medusa", "eagle", "eagle1", "mtp", "specformer"]
# Kinds of heads, and the options beside the beam length that each has.
HEADS: Mapping[Head, tuple[str, ...]] = {
    "redrafter": ("exit_dim", "layers", "draft_vocab", "fused", "layers_read"),
    "medusa": ("layers", "draft_vocab"),
    "eagle": ("draft_vocab", "layers_read"),
    "eagle1": (),
    "mtp": (),
    "specformer": ("layers_read",),
}
# Heads that attend to the text before, of which rollouts are no part.
READING_CONTEXT: tuple[Head, ...] = ("eagle", "eagle1", "mtp", "specformer")
ComputeDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class DataOptions:
    """Options of the texts to train on.

    Attributes:
        max_tokens: Largest number of tokens to train on, None for all texts.
        sequence_length: Length of the longest sequence, in tokens; longer texts are cut.
        written_share: Share of the tokens that the target generates itself, 0 to 1.
        answer_tokens: Length of the longest self-generated text, in tokens.
        temp: Sampling temperature of half of the self-generated texts; the other half is greedy.
        held_out: Number of self-generated texts that only measure tokens per step.
        seed: Random seed for the choice of texts and for sampling.
    """

    max_tokens: int | None = None
    sequence_length: int = 512
    written_share: float = 0.5
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
        check_number("self_written", self.written_share, 0, 1)
        check_number("temp", self.temp, 0, 100)


@dataclass(frozen=True)
class NetworkOptions:
    """Shape of the drafter; the defaults suit small and large targets.

    Attributes:
        head: Kind of the drafter: a recurrent one, Medusa heads, EAGLE-3, EAGLE-1, an MTP module in
            MiMo's format, or a SpecFormer.
        exit_dim: Width of the head; by default 1024, or twice the hidden size if that is less.
        num_layers: Number of residual blocks before the head; by default 2, of Medusa heads 1.
        beam_length: L, root included; training unrolls the drafter ``L - 1`` steps.
        draft_vocab: Number of tokens that the drafter can propose, the most frequent ones of the
            texts; None for all. With large vocabularies the head is most of the cost of a draft.
        fused: Whether the recurrent drafter reads two layers of the target beside its last hidden
            state.
        layers_read: Layers of the target whose inputs a fused drafter, an EAGLE-3 head or a
            SpecFormer reads, -1 for the last hidden state; by default a low, a middle and a high
            one, of a fused drafter -1 for the high one, and of a SpecFormer -1 as well.
    """

    head: Head = "redrafter"
    exit_dim: int | None = None
    num_layers: int | None = None
    beam_length: int = 5
    draft_vocab: int | None = None
    fused: bool = False
    layers_read: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ConfigError(f"head must be one of {', '.join(HEADS)}, got {self.head!r}")
        given = {
            "exit_dim": self.exit_dim,
            "layers": self.num_layers,
            "draft_vocab": self.draft_vocab,
            "fused": self.fused or None,
            "layers_read": self.layers_read,
        }
        for name, value in given.items():
            if value is not None and name not in HEADS[self.head]:
                raise ConfigError(f"{name} has no meaning for the head {self.head}; leave it out")
        if self.layers_read is not None:
            check_captured_layers(self.layers_read, FINAL)
            if self.head == "redrafter" and not self.fused:
                raise ConfigError("layers_read needs fused, without which one state is read")
        if self.draft_vocab is not None:
            check_int("draft_vocab", self.draft_vocab, 1)
        if self.exit_dim is not None:
            check_int("exit_dim", self.exit_dim, 1)
        if self.num_layers is not None:
            check_int("layers", self.num_layers, 0, 16)
        check_int("length", self.beam_length, 2, MAX_BEAM_LENGTH, " (the root counts as one)")


@dataclass(frozen=True)
class LossOptions:
    """Options of the training objective.

    Attributes:
        recipe: Training objective. "soft": KL divergence from the target's distributions, from one
            pass over the text. "coupled": probability of sampling the target's token with the same
            noise, from the same pass. "apple": cross-entropy on the text, as in Apple's released
            code. "rollouts": cross-entropy on greedy continuations of every position by the
            target, the paper's Eq. 2.
        position_decay: Weight of each unroll step relative to the one before; `DISTILLING` only.
        confidence_floor: Smoothing a of the probability that earlier drafts are accepted, by which
            a draft counts: each acceptance probability q becomes ``(1 - a) q + a``; 1 gives all
            drafts the same weight. `DISTILLING` only.
    """

    recipe: Recipe = "soft"
    position_decay: float = 0.8
    confidence_floor: float = 0.5

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ConfigError(f"recipe must be one of {', '.join(RECIPES)}, got {self.recipe!r}")
        check_number("position_decay", self.position_decay, 0, 1)
        check_number("confidence_floor", self.confidence_floor, 0, 1)


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the optimisation.

    Attributes:
        epochs: Number of passes over the text.
        minutes: Approximate time of the whole run, replaces ``epochs``: training gets what writing,
            reading and evaluation leave of it.
        batch_tokens: Positions per optimiser step.
        learning_rate: Peak of the schedule, which is a linear warm-up, then a cosine to a hundredth
            of the peak; None for `Student.learning_rate`.
        warmup: Share of the steps spent warming up, 0 to 1.
        max_grad_norm: Largest norm of the gradient; longer gradients are scaled down.
        ema_decay: Decay of the moving average of the weights, which is exported.
        num_evaluations: Number of measurements of tokens per step over the whole run; fewer in
            short runs.
        patience: Number of measurements without improvement, in the second half of the run, that
            stops training.
        checkpoint_seconds: Longest time between checkpoints, in seconds; 0 writes one after every
            step.
        compute_dtype: Dtype of forward and backward pass; the weights are kept in float32.
        seed: Random seed for the initial weights and the order of the positions.
    """

    epochs: int = 3
    minutes: float | None = None
    batch_tokens: int = 1024
    learning_rate: float | None = None
    warmup: float = 0.05
    max_grad_norm: float = 1.0
    ema_decay: float = 0.998
    num_evaluations: int = 20
    patience: int = 5
    checkpoint_seconds: float = 60.0
    compute_dtype: ComputeDtype = "float32"
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
        check_number("warmup", self.warmup, 0, 1)
        check_number("max_grad_norm", self.max_grad_norm, 0, math.inf)
        check_number("ema_decay", self.ema_decay, 0, 1)
        check_number("checkpoint_seconds", self.checkpoint_seconds, 0, math.inf)
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ConfigError(
                f"compute_dtype must be float32 or bfloat16, got {self.compute_dtype!r}"
            )


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise `ConfigError` unless ``value`` is a number in ``[low, high]``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")


def check_dtype(dtype: object) -> None:
    """Raise `ConfigError` unless ``dtype`` is a dtype of drafters."""
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ConfigError(f"dtype must be float16, bfloat16 or float32, got {dtype!r}")
