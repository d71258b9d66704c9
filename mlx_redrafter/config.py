"""Validated options, one frozen dataclass per lifetime.

`DrafterConfig` lives as long as a checkpoint, `TreeShape` as long as a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from mlx_redrafter.errors import CheckpointError, ConfigError

MODEL_TYPE = "recurrent_drafting_drafter"
MAX_BEAM_WIDTH = 64
MAX_BEAM_LENGTH = 16
# Nodes that a level of drafting scores for each that it expands, unless there is but one.
SCORED_PER_BEAM = 4
# Bounds on what a config file may claim, far above any model.
MAX_DIMENSION = 2**24
MAX_DRAFT_LAYERS = 64
MAX_SCORE_SCALE = 100

Activation = Literal["silu", "identity"]
Selection = Literal["top_n", "beam"]
Auto = Literal["auto"]


def check_int(name: str, value: object, low: int, high: int | None = None, hint: str = "") -> None:
    """Raise `ConfigError` unless ``value`` is an integer in ``[low, high]``."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
        expected = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be an integer {expected}{hint}, got {value!r}")


def check_max_tokens(value: object) -> None:
    """Raise `ConfigError` unless ``value`` is a number of tokens, or -1 for no limit."""
    check_int("max_tokens", value, -1, hint=" (-1: no limit)")
    if value == 0:
        raise ConfigError("max_tokens must be 1 or more, or -1 for no limit, got 0")


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a recurrent drafter, as stored in its ``config.json``.

    Attributes:
        vocab_size: Size of the target's vocabulary.
        hidden_size: Size of the target's last hidden state, H.
        exit_dim: Width of the head's residual blocks; ``2 * hidden_size`` needs no projection.
        num_draft_layers: Number of residual SiLU blocks before the final linear layer.
        rnn: True for the recurrent state update, False for the plain sum of embeddings.
        rnn_activation: "silu" (Apple) or "identity" (TensorRT-LLM's linear recurrence).
        rnn_first_step_bias: False leaves ``rnn_u``'s bias out of the first step (TensorRT-LLM).
        draft_top_k: Keep only this many logits per distribution before normalising (Apple: 50),
            or None to keep them all.
        draft_vocab_size: Rows of the head when it proposes only part of the vocabulary, else None.
        score_scale: Calibration: what logits are multiplied by before drafts for a greedy target
            are ranked, so that their probabilities are the chances of being accepted.
        noise_share: Calibration: the share of the target's noise that drafts are ranked with when
            it samples, 0 to 1.
    """

    vocab_size: int
    hidden_size: int
    exit_dim: int
    num_draft_layers: int
    rnn: bool = False
    rnn_activation: Activation = "silu"
    rnn_first_step_bias: bool = True
    draft_top_k: int | None = None
    draft_vocab_size: int | None = None
    score_scale: float = 1.0
    noise_share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "exit_dim"):
            check_int(f"drafter {name}", getattr(self, name), 1, MAX_DIMENSION)
        check_int("drafter num_draft_layers", self.num_draft_layers, 0, MAX_DRAFT_LAYERS)
        for name in ("rnn", "rnn_first_step_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"drafter {name} must be true or false, got {getattr(self, name)!r}"
                )
        if self.rnn_activation not in ("silu", "identity"):
            raise ConfigError(
                f"drafter rnn_activation must be 'silu' or 'identity', got {self.rnn_activation!r}"
            )
        for name in ("draft_top_k", "draft_vocab_size"):
            if getattr(self, name) is not None:
                check_int(f"drafter {name}", getattr(self, name), 1, self.vocab_size)
        scale = self.score_scale
        if not _is_number(scale) or not 0 < scale <= MAX_SCORE_SCALE:
            raise ConfigError(
                f"drafter score_scale must be above 0 and at most {MAX_SCORE_SCALE}, got {scale!r}"
            )
        share = self.noise_share
        if not _is_number(share) or not 0 <= share <= 1:
            raise ConfigError(f"drafter noise_share must be from 0 to 1, got {share!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrafterConfig:
        """Read a ``config.json``; keys that belong to other programs are ignored.

        Raises:
            CheckpointError: The file describes another kind of model, lacks a key, or has a value
                out of range.
        """
        model_type = values.get("model_type", MODEL_TYPE)
        if model_type != MODEL_TYPE:
            raise CheckpointError(
                f"expected a drafter with model_type {MODEL_TYPE!r}, found {model_type!r}; "
                "a PyTorch drafter is made loadable by `redrafter-mlx convert`"
            )
        required = ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers")
        missing = [name for name in required if name not in values]
        if missing:
            raise CheckpointError(f"the drafter's config.json lacks {', '.join(missing)}")
        known = {field.name for field in fields(cls)}
        try:
            return cls(**{name: value for name, value in values.items() if name in known})
        except ConfigError as error:
            raise CheckpointError(f"the drafter's config.json is out of range: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The keys of ``config.json`` that describe this drafter."""
        return {"model_type": MODEL_TYPE, **asdict(self)}

    @property
    def has_input_proj(self) -> bool:
        """Apple's rule: the head projects its input when the widths differ."""
        return self.exit_dim != 2 * self.hidden_size

    @property
    def head_rows(self) -> int:
        """Rows of the final linear layer."""
        return self.draft_vocab_size or self.vocab_size


@dataclass(frozen=True)
class TreeShape:
    """What one step drafts: W beams of L tokens, of which a tree of N nodes is verified.

    Attributes:
        beam_width: W, the nodes expanded per level.
        beam_length: L, the tokens of a beam, root included (Apple's ``beam_length``).
        tree_nodes: N, the tokens verified per step, root included; None with ``select="beam"``,
            where the merged beams decide.
        select: "top_n" keeps the N - 1 most probable drafts, "beam" the paper's beams with shared
            prefixes merged.
    """

    beam_width: int = 4
    beam_length: int = 5
    tree_nodes: int | None = None
    select: Selection = "top_n"

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        hint = " (the root counts as one)"
        check_int("beam_length", self.beam_length, 2, MAX_BEAM_LENGTH, hint)
        if self.select not in ("top_n", "beam"):
            raise ConfigError(f"select must be 'top_n' or 'beam', got {self.select!r}")
        if self.select == "beam":
            if self.tree_nodes is not None:
                raise ConfigError(
                    "tree_nodes cannot be chosen with select='beam', whose merged beams decide it; "
                    "leave it out or use select='top_n'"
                )
        elif self.tree_nodes is None:
            object.__setattr__(self, "tree_nodes", min(9, self.max_nodes))
        else:
            hint = f" for beam_width {self.beam_width} and beam_length {self.beam_length}"
            check_int("tree_nodes", self.tree_nodes, 2, self.max_nodes, hint)

    @property
    def draft_length(self) -> int:
        """Levels of drafts below the root."""
        return self.beam_length - 1

    @property
    def level_nodes(self) -> int:
        """Most nodes that the expansion scores per level, of which W are expanded.

        The others cost nothing, as their probabilities are there, and may be verified.
        """
        return 1 if self.beam_width == 1 else SCORED_PER_BEAM * self.beam_width

    @property
    def max_nodes(self) -> int:
        """Most nodes a verified tree can have, root included."""
        if self.select == "beam":
            return 1 + self.beam_width * self.draft_length
        return 1 + self.draft_length * self.level_nodes


def find_shape(
    beam_width: int | Auto, beam_length: int | Auto, tree_nodes: int | Auto, select: Selection
) -> TreeShape | None:
    """The shape asked for, None when every step may choose its own.

    Raises:
        ConfigError: It is out of range.
    """
    sizes = {"beam_width": beam_width, "beam_length": beam_length, "tree_nodes": tree_nodes}
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size != "auto"}
    if not given and select == "top_n":
        return None
    return TreeShape(**given, select=select)


@dataclass(frozen=True)
class SamplingParams:
    """How the target's tokens are chosen, with mlx-lm's meaning of every option.

    Attributes:
        temp: Temperature; 0 takes the most probable token.
        top_p: Nucleus mass, off at 0 and at 1.
        top_k: Number of most probable tokens kept, off at 0.
        min_p: Least probability relative to the most probable token, off at 0.
        seed: Key of the noise, 0 to 2**32 - 1. The text depends on nothing else.
    """

    temp: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.temp) or not math.isfinite(self.temp) or self.temp < 0:
            raise ConfigError(f"temp must be a finite number, 0 or more, got {self.temp!r}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise ConfigError(f"{name} must be a number from 0 to 1 (0: off), got {value!r}")
        check_int("top_k", self.top_k, 0, hint=" (0: off)")
        check_int("seed", self.seed, 0, 2**32 - 1)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
