"""The shape of a SpecFormer, as stored in the ``config.json`` beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_redrafter.checks import check_int
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers.layer_sizes import SIZES, check_captured_layers, check_layer
from mlx_redrafter.proposers.stored_config import read_fields, write_fields
from mlx_redrafter.target.target import FINAL

MODEL_TYPE = "redrafter_specformer"
# Bound on what a config file may claim.
MAX_SLOTS = 64


@dataclass(frozen=True)
class SpecFormerConfig:
    """The shape of a SpecFormer.

    Attributes:
        hidden_size: Hidden size of the network and of the target, H.
        intermediate_size: Width of the MLP.
        num_attention_heads: Query heads.
        num_key_value_heads: Key heads.
        vocab_size: Size of the target's vocabulary.
        captured_layers: Layers of the target whose inputs are read, -1 for its last hidden states.
        num_slots: Number of tokens that it drafts, S.
        head_dim: Size of a head; None for H divided by the query heads.
        rms_norm_eps: Epsilon of the norms.
        rope_theta: Base of the rotary embeddings.
        rope_scaling: Their scaling, as mlx-lm reads it; None for none.
        max_position_embeddings: Positions that the network was made for.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    captured_layers: tuple[int, ...]
    num_slots: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048
    # Its head is the target's, whole.
    draft_vocab_size: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_layer(self)
        layers = self.captured_layers
        if not isinstance(layers, (list, tuple)):
            raise ConfigError(f"captured_layers must be a list, got {layers!r}")
        object.__setattr__(self, "captured_layers", tuple(layers))
        check_captured_layers(self.captured_layers, FINAL)
        check_int("num_slots", self.num_slots, 1, MAX_SLOTS)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpecFormerConfig:
        """Read a ``config.json``; keys that belong to other programs are ignored.

        Raises:
            CheckpointError: The file describes another kind of model, lacks a key, or has a value
                out of range.
        """
        model_type = values.get("model_type")
        if model_type != MODEL_TYPE:
            raise CheckpointError(
                f"expected a drafter with model_type {MODEL_TYPE!r}, found {model_type!r}"
            )
        return read_fields(cls, values, (*SIZES, "captured_layers", "num_slots"))

    def to_dict(self) -> dict[str, Any]:
        """The keys of ``config.json`` that describe this network."""
        return write_fields(self, MODEL_TYPE)

    @property
    def summary(self) -> str:
        """Sizes, in words."""
        return (
            f"SpecFormer of {self.num_slots} slots, hidden_size {self.hidden_size}, "
            f"intermediate_size {self.intermediate_size}, reads {len(self.captured_layers)} layers"
        )
