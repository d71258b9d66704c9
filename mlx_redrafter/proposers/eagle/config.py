"""The shape of an EAGLE head, as stored in the ``config.json`` next to its weights."""

from dataclasses import dataclass
from typing import ClassVar

from mlx_redrafter.checks import check_choice, check_int
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.layer_sizes import (
    FULL,
    SLIDING,
    LayerSizes,
    check_captured_layers,
    check_layer_types,
)
from mlx_redrafter.proposers.stored_config import MAX_COUNT, MAX_DIMENSION

MODEL_TYPE = "redrafter_eagle"
# Decoder layers of mlx-lm that heads have.
LAYER_TYPES = ("llama", "qwen3")


@dataclass(frozen=True)
class EagleConfig(LayerSizes):
    """The shape of an EAGLE head; that of EAGLE-2 is EAGLE-1's.

    Attributes:
        version: 1 reads the target's hidden state after its final norm, 3 the inputs of several of
            its layers.
        draft_vocab_size: Rows of the head if it proposes only part of the vocabulary, else None.
        layer_type: "llama", or "qwen3", which normalises queries and keys.
        fc_bias: Whether the layer ``fc``, which joins the inputs, has a bias.
        captured_layers: EAGLE-3: layers of the target whose inputs it reads, L for the last output
            before the final norm; None for layers 2, L // 2 and L - 3 of its L.
        reads_hidden_state: EAGLE-3: whether it reads the target's state after the final norm
            instead, as NVIDIA's heads without ``fc`` do.
        own_embedding: EAGLE-3: whether it has an embedding of its own for tokens, not the target's.
        mask_token_id: P-EAGLE: token that stands for the drafts before, which all depths are
            drafted without; None for a head that drafts one token after another.
        max_length: P-EAGLE: maximum length of its beams, root included.
        sliding_window: Number of tokens that sliding layers attend to; None if there are none.
        layer_types: One of `ATTENTION_TYPES` for each layer; None for all full.
        norm_before_residual: EAGLE-3: whether the residual is the normalised feature.
        norm_before_fc: EAGLE-3: whether the head normalises the states as one row before ``fc``.
        fc_norm: EAGLE-3: whether it normalises the states of every layer.
        norm_output: EAGLE-3: whether it normalises the output that it feeds back (EAGLE 3.1).
    """

    model_type: ClassVar[str] = MODEL_TYPE
    version: int
    draft_vocab_size: int | None = None
    num_hidden_layers: int = 1
    layer_type: str = "llama"
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    captured_layers: tuple[int, ...] | None = None
    reads_hidden_state: bool = False
    own_embedding: bool = False
    mask_token_id: int | None = None
    max_length: int | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        check_choice("EAGLE version", self.version, (1, 3))
        check_choice("layer_type", self.layer_type, LAYER_TYPES)
        super().__post_init__()
        check_int("num_hidden_layers", self.num_hidden_layers, 1, MAX_COUNT)
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc and fc_norm exclude each other, got both")
        if self.captured_layers is not None:
            check_captured_layers(self.captured_layers)
        if self.reads_hidden_state and self.captured_layers is not None:
            raise ConfigError("reads_hidden_state and captured_layers exclude each other, got both")
        if self.layer_types is not None:
            check_layer_types(self.layer_types, self.num_hidden_layers)
            if SLIDING in self.layer_types:
                check_int("sliding_window", self.sliding_window, 1, MAX_DIMENSION)
        if self.mask_token_id is not None:
            check_int("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1)
            check_int("max_length", self.max_length, 2, MAX_BEAM_LENGTH)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Number of tokens that each layer attends to; None for all of them."""
        kinds = self.layer_types or (FULL,) * self.num_hidden_layers
        return tuple(self.sliding_window if kind == SLIDING else None for kind in kinds)

    @property
    def name(self) -> str:
        if self.mask_token_id is not None:
            return "P-EAGLE"
        return "EAGLE-3" if self.version == 3 else "EAGLE-1/2"

    @property
    def summary(self) -> str:
        return (
            f"{self.name}, hidden_size {self.hidden_size}, intermediate_size "
            f"{self.intermediate_size}, head of {self.head_rows} tokens"
        )

    @property
    def num_captured(self) -> int:
        if self.version == 1 or self.reads_hidden_state:
            return 1
        return 3 if self.captured_layers is None else len(self.captured_layers)
