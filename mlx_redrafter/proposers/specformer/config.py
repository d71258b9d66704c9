"""The shape of a SpecFormer, as stored in the ``config.json`` beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_redrafter.checks import check_int
from mlx_redrafter.proposers.layer_sizes import check_captured_layers, check_layer
from mlx_redrafter.proposers.stored_config import StoredConfig
from mlx_redrafter.target.target import FINAL

MODEL_TYPE = "redrafter_specformer"
# Largest number of slots that a config file may claim, far above any network.
MAX_SLOTS = 64


@dataclass(frozen=True)
class SpecFormerConfig(StoredConfig):
    """The shape of a SpecFormer.

    Attributes:
        hidden_size: Hidden size of the network and of the target, H.
        intermediate_size: Width of the MLP.
        num_attention_heads: Query heads.
        num_key_value_heads: Key heads.
        vocab_size: Size of the target's vocabulary.
        captured_layers: Layers of the target whose inputs it reads, -1 for its last hidden states.
        num_slots: Number of tokens that it drafts, S.
        head_dim: Size of a head; None for H divided by the query heads.
        rms_norm_eps: Epsilon of the norms.
        rope_theta: Base of the rotary embeddings.
        rope_scaling: Their scaling, as mlx-lm reads it; None for none.
        max_position_embeddings: Positions that the network was made for.
    """

    model_type: ClassVar[str] = MODEL_TYPE
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
    # The network uses the target's whole head.
    draft_vocab_size: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_layer(self)
        layers = check_captured_layers(self.captured_layers, FINAL)
        object.__setattr__(self, "captured_layers", layers)
        check_int("num_slots", self.num_slots, 1, MAX_SLOTS)

    @property
    def summary(self) -> str:
        """Sizes, in words."""
        return (
            f"SpecFormer of {self.num_slots} slots, hidden_size {self.hidden_size}, "
            f"intermediate_size {self.intermediate_size}, reads {len(self.captured_layers)} layers"
        )
