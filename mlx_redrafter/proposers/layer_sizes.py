"""Sizes of mlx-lm's layers in networks that use them, as their configs name them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mlx_redrafter.checks import check_int, is_number
from mlx_redrafter.errors import CheckpointError, ConfigError, first_line
from mlx_redrafter.proposers.stored_config import MAX_DIMENSION

# Largest number of captured layers that a config file may claim, far above any model.
MAX_CAPTURED = 64
# Sizes that every config of such layers has.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
)
# Further arguments of mlx-lm's layers, under the same names.
LAYER_ARGS = (
    *SIZES,
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
)

C = TypeVar("C")
N = TypeVar("N")


def check_layer(config: Any) -> None:
    """Raise `ConfigError` unless mlx-lm's layers can have the sizes of a config."""
    for name in (*SIZES, "max_position_embeddings"):
        check_int(name, getattr(config, name), 1, MAX_DIMENSION)
    if config.head_dim is not None:
        check_int("head_dim", config.head_dim, 1, MAX_DIMENSION)
    for name in ("rms_norm_eps", "rope_theta"):
        if not is_number(getattr(config, name)) or not getattr(config, name) > 0:
            raise ConfigError(f"{name} must be above 0, got {getattr(config, name)!r}")
    if not isinstance(config.rope_scaling, (Mapping, type(None))):
        raise ConfigError(f"rope_scaling must be an object or null, got {config.rope_scaling!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads must be a multiple of num_key_value_heads, got "
            f"{config.num_attention_heads} and {config.num_key_value_heads}"
        )
    if config.head_dim is None and config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"hidden_size must be a multiple of num_attention_heads without head_dim, got "
            f"{config.hidden_size} and {config.num_attention_heads}"
        )
    check_int(
        "num_attention_heads times head_dim",
        config.num_attention_heads * (config.head_dim or 1),
        1,
        MAX_DIMENSION,
    )


def check_captured_layers(layers: object, lowest: int = 0) -> tuple[int, ...]:
    """Check that these can be layers of a target, numbered from ``lowest``, and return them.

    Raises:
        ConfigError: They are no list, too many, or out of range.
    """
    if not isinstance(layers, (list, tuple)) or not 1 <= len(layers) <= MAX_CAPTURED:
        raise ConfigError(
            f"captured_layers must be a list of 1 to {MAX_CAPTURED} layers, got "
            f"{reprlib.repr(layers)}"
        )
    for layer in layers:
        check_int("each of captured_layers", layer, lowest, MAX_DIMENSION)
    return tuple(layers)


def layer_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments of mlx-lm's layers for the sizes in a config."""
    return {
        **{name: getattr(config, name) for name in LAYER_ARGS},
        "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
        "tie_word_embeddings": False,
    }


def build(network: Callable[[C], N], config: C) -> N:
    """Make a network with layers of mlx-lm, whose random weights are not computed.

    Raises:
        CheckpointError: mlx-lm cannot make the layers, as it does not know their rope_scaling.
    """
    try:
        return network(config)
    except Exception as error:  # mlx-lm has no exception of its own
        raise CheckpointError(
            f"mlx-lm cannot make the drafter's layers: {first_line(error)}; check rope_scaling in "
            "config.json"
        ) from error
