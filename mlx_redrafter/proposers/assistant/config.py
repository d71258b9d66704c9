"""The shape of a Gemma 4 assistant, as published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from mlx_redrafter.checks import check_int
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.proposers.layer_sizes import check_layer_types
from mlx_redrafter.proposers.stored_config import MAX_COUNT, MAX_DIMENSION, reading

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
# Sizes in the object text_config.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "sliding_window")


@dataclass(frozen=True)
class AssistantConfig:
    """The shape of an assistant, of the sizes of its target.

    Attributes:
        text: Arguments of mlx-lm's layers.
        ties_head: Whether its head is its embedding.
        num_centroids: Number of clusters of tokens; None if every token is scored.
        top_centroids: Number of clusters whose tokens are scored.
        values: The config as published.
    """

    hidden_size: int
    vocab_size: int
    text: Mapping[str, Any] = field(repr=False)
    ties_head: bool
    num_centroids: int | None
    top_centroids: int
    values: Mapping[str, Any] = field(repr=False, compare=False)
    draft_vocab_size: ClassVar[None] = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        text = values.get("text_config")
        if not isinstance(text, Mapping):
            raise CheckpointError(
                "expected an object text_config in the config.json of a Gemma 4 assistant, found "
                "none; download it again"
            )
        is_clustered = values.get("use_ordered_embeddings", False)
        with reading("the assistant's config.json is"):
            _check_text(text)
            return cls(
                hidden_size=values.get("backbone_hidden_size", 0),
                vocab_size=text["vocab_size"],
                text=dict(text),
                ties_head=values.get("tie_word_embeddings", True) is not False,
                num_centroids=values.get("num_centroids", 2048) if is_clustered else None,
                top_centroids=values.get("centroid_intermediate_top_k", 32),
                values=values,
            )

    def __post_init__(self) -> None:
        check_int("backbone_hidden_size", self.hidden_size, 1, MAX_DIMENSION)
        if self.num_centroids is None:
            return
        check_int("num_centroids", self.num_centroids, 1, self.vocab_size)
        check_int("centroid_intermediate_top_k", self.top_centroids, 1, self.num_centroids)
        if self.vocab_size % self.num_centroids:
            raise ConfigError(
                f"vocab_size must be a multiple of num_centroids, got {self.vocab_size} and "
                f"{self.num_centroids}"
            )
        if not self.ties_head:
            raise ConfigError("use_ordered_embeddings needs tie_word_embeddings, got a head apart")

    @property
    def head_rows(self) -> int:
        return self.vocab_size

    @property
    def summary(self) -> str:
        layers = self.text["num_hidden_layers"]
        return f"Gemma 4 assistant of {layers} layers, hidden_size {self.hidden_size} of its target"

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def _check_text(text: Mapping[str, Any]) -> None:
    for name in (*SIZES, "vocab_size"):
        check_int(name, text.get(name), 1, MAX_DIMENSION)
    check_int("num_hidden_layers", text.get("num_hidden_layers"), 1, MAX_COUNT)
    check_layer_types(text.get("layer_types"), text["num_hidden_layers"])
    for name in ("enable_moe_block", "hidden_size_per_layer_input"):
        if text.get(name):
            raise ConfigError(f"{name} must be absent or 0 in an assistant, got {text[name]!r}")
