"""Sizes of mlx-lm's layers in networks that use them, as their configs name them, and YaRN."""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.rope_utils import YarnRoPE

from mlx_redrafter.checks import check_instance, check_int, check_multiple, check_positive
from mlx_redrafter.errors import CheckpointError, ConfigError, first_line
from mlx_redrafter.proposers.stored_config import MAX_COUNT, MAX_DIMENSION, StoredConfig

# Names in configs for attention to all tokens, and to those of a window.
ATTENTION_TYPES = FULL, SLIDING = "full_attention", "sliding_attention"

C = TypeVar("C")
N = TypeVar("N")


@dataclass(frozen=True, kw_only=True)
class LayerSizes(StoredConfig):
    """Sizes of mlx-lm's layers in a network; a base of its config.

    They have mlx-lm's names. A head's size is H divided by the query heads if ``head_dim`` is None.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ):
            check_int(name, getattr(self, name), 1, MAX_DIMENSION)
        if self.head_dim is not None:
            check_int("head_dim", self.head_dim, 1, MAX_DIMENSION)
        for name in ("rms_norm_eps", "rope_theta"):
            check_positive(name, getattr(self, name))
        check_instance("rope_scaling", self.rope_scaling, (Mapping, NoneType), "an object or null")
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
        if self.head_dim is None:
            of = "num_attention_heads without head_dim"
            check_multiple("hidden_size", self.hidden_size, of, heads)
        if self.head_size % 2:
            raise ConfigError(f"head_dim must be even to be rotated, got {self.head_size}")
        width = heads * (self.head_dim or 1)
        check_int("num_attention_heads times head_dim", width, 1, MAX_DIMENSION)

    @property
    def head_size(self) -> int:
        """Numbers of an attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def check_captured_layers(layers: object, lowest: int = 0) -> None:
    """Check that these can be layers of a target, numbered from ``lowest``."""
    if not isinstance(layers, tuple) or not 1 <= len(layers) <= MAX_COUNT:
        raise ConfigError(
            f"captured_layers must be a list of 1 to {MAX_COUNT} layers, got {reprlib.repr(layers)}"
        )
    for layer in layers:
        check_int("each of captured_layers", layer, lowest, MAX_DIMENSION)


def check_layer_types(kinds: Any, count: int) -> None:
    """Check that these are kinds of attention, one for each of ``count`` layers."""
    is_list = isinstance(kinds, (list, tuple)) and len(kinds) == count
    if not is_list or not all(kind in ATTENTION_TYPES for kind in kinds):
        raise ConfigError(
            f"layer_types must be one of {ATTENTION_TYPES} for each of {count} layers, got "
            f"{reprlib.repr(kinds)}"
        )


def layer_arguments(config: LayerSizes) -> dict[str, Any]:
    """Return the arguments of mlx-lm's layers for the sizes in a config."""
    return {
        **{field.name: getattr(config, field.name) for field in fields(LayerSizes)},
        "head_dim": config.head_size,
        "tie_word_embeddings": False,
    }


def build(network: Callable[[C], N], config: C) -> N:
    """Make a network with layers of mlx-lm, whose random weights are not computed."""
    try:
        return network(config)
    except Exception as error:  # mlx-lm has no exception of its own
        raise CheckpointError(
            f"mlx-lm cannot make the drafter's layers: {first_line(error)}; check rope_scaling in "
            "config.json"
        ) from error


def complete_yarn(rope: Any, config: LayerSizes) -> None:
    """Give a rotary embedding of mlx-lm, in place, the frequencies and factor of transformers.

    Heads were trained with YaRN (arXiv 2309.00071) as transformers computes it. mlx-lm always
    rounds the range of dimensions that are partly interpolated, and has no ``attention_factor``. A
    target keeps the embedding that mlx-lm gives it.

    Embeddings without YaRN stay as they are. A number of the scaling that is missing or not above 0
    raises ConfigError.
    """
    if not isinstance(rope, YarnRoPE):
        return
    scaling = config.rope_scaling or {}
    numbers = ["factor", "original_max_position_embeddings"]
    if scaling.get("attention_factor") is not None:
        numbers.append("attention_factor")
    for key in numbers:
        check_positive(f"rope_scaling {key}", scaling.get(key))
    rope._freqs = _wavelengths(rope.dims, config.rope_theta, scaling)
    rope.mscale = _attention_factor(scaling)


def _attention_factor(scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    all_dim = scaling.get("mscale_all_dim")
    scale = math.log(max(scaling["factor"], 1.0))
    mscales = (scaling["mscale"], all_dim) if scaling.get("mscale") and all_dim else (1.0, 0.0)
    above, below = (0.1 * mscale * scale + 1.0 for mscale in mscales)
    return above / below


def _wavelengths(dims: int, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """Return the inverse frequencies' inverses, float32, shape (dims / 2,)."""
    length = scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """Return the dimension that turns so often within the original context."""
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = mx.clip((mx.arange(dims // 2, dtype=mx.float32) - low) / (high - low), 0, 1)
    plain = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    return 1 / (ramp / (scaling["factor"] * plain) + (1 - ramp) / plain)
