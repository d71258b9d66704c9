"""Sizes of a Llama, and those of a larger one that contains it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_redrafter.errors import CheckpointError, ConfigError

# Divisor of all new sizes; smaller heads are widened towards it.
ALIGNMENT = 64


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama, named as in its ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LlamaShape:
        """Read a ``config.json``.

        Raises:
            CheckpointError: The model is not a plain Llama, but of another architecture, quantised
                or with biases.
        """
        found = config.get("model_type")
        if found != "llama":
            raise CheckpointError(f"only model_type 'llama' can be widened, found {found!r}")
        for key in ("quantization", "attention_bias", "mlp_bias", "sliding_window"):
            if config.get(key):
                raise CheckpointError(
                    f"a model with {key} cannot be widened; use an unquantised plain Llama"
                )
        heads = config["num_attention_heads"]
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            tie_word_embeddings=config.get("tie_word_embeddings", True),
        )

    @property
    def num_parameters(self) -> int:
        """Weights of the model; a tied head counts once."""
        attention = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size + 2)
        embeddings = self.vocab_size * (1 if self.tie_word_embeddings else 2)
        return layer * self.num_hidden_layers + self.hidden_size * (embeddings + 1)


def widened_shape(
    old: LlamaShape, num_parameters: int, num_layers: int | None = None, keep_heads: bool = False
) -> LlamaShape:
    """Find the shape nearest to a number of parameters that contains the old one.

    Args:
        old: Shape of the small model.
        num_parameters: Number of parameters wanted, at least the small model's.
        num_layers: Number of layers wanted, by default the small model's.
        keep_heads: Whether the heads keep their size.

    Raises:
        ConfigError: The small model does not fit.
    """
    layers = old.num_hidden_layers if num_layers is None else num_layers
    if layers < old.num_hidden_layers:
        raise ConfigError(
            f"layers must be at least the model's {old.num_hidden_layers}, got {layers}"
        )
    repeats = old.num_attention_heads // old.num_key_value_heads
    head_dim = old.head_dim * (1 if keep_heads else max(1, ALIGNMENT // old.head_dim))

    def with_hidden_size(hidden_size: int) -> LlamaShape:
        groups = hidden_size // (head_dim * repeats)
        neurons = old.intermediate_size * hidden_size / old.hidden_size
        return dataclasses.replace(
            old,
            hidden_size=hidden_size,
            intermediate_size=max(old.intermediate_size, round(neurons / ALIGNMENT) * ALIGNMENT),
            num_hidden_layers=layers,
            num_attention_heads=groups * repeats,
            num_key_value_heads=groups,
            head_dim=head_dim,
        )

    # Whole heads fill the hidden state; transformers, which loads the tokenizer, insists on it.
    step = math.lcm(ALIGNMENT, head_dim * repeats)
    size = -(-max(old.hidden_size, old.num_attention_heads * head_dim) // step) * step
    best = with_hidden_size(size)
    if best.num_parameters > 2 * num_parameters:
        raise ConfigError(
            f"the widened model has at least {best.num_parameters} parameters, got "
            f"{num_parameters}; ask for more"
        )
    while best.num_parameters < num_parameters:
        previous, size = best, size + step
        best = with_hidden_size(size)
        if num_parameters - previous.num_parameters < best.num_parameters - num_parameters:
            best = previous
            break
    missing = num_parameters - best.num_parameters
    neurons = best.intermediate_size + missing / (3 * best.hidden_size * layers)
    neurons = max(old.intermediate_size, round(neurons / ALIGNMENT) * ALIGNMENT)
    return dataclasses.replace(best, intermediate_size=neurons)
