"""Sizes of a model, from its config alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_redrafter.bench.chips import BYTES
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.proposers.kind import text_values
from mlx_redrafter.target.model_loading import make_model
from mlx_redrafter.target.model_parts import find_parts


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    ``active`` is the number of parameters read per token, fewer than all in a mixture of experts.
    ``bits`` are those of the weights, the nearest of 32, 16, 8 and 4. ``cache_bytes`` are those of
    the K/V entries of a token in all layers, 0 if the config does not say.
    """

    name: str
    parameters: float
    active: float
    bits: int
    hidden_size: int
    vocab_size: int
    cache_bytes: int = 0

    def __str__(self) -> str:
        active = ""
        if self.active < self.parameters:
            active = f", {_format_count(self.active)} of them for a token"
        return (
            f"{self.name}: {_format_count(self.parameters)} parameters{active}, {self.bits} bits, "
            f"hidden size {self.hidden_size}, {self.vocab_size:,} tokens"
        )


def shape_of_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Read the sizes of a model from its ``config.json``, without creating weights.

    Raise `CheckpointError` if mlx-lm lacks it, `UnsupportedTargetError` if no text would be exact.
    """
    model = make_model(name, config)
    parts = find_parts(model)
    weights = named_parameters(model).values()
    parameters = sum(weight.size for weight in weights)
    values = text_values(config)
    chosen = values.get("num_experts_per_tok", values.get("moe_topk"))
    idle = 0.0
    if isinstance(chosen, int):  # experts are stacked: weights of three axes
        stacked = [weight for weight in weights if weight.ndim == 3]
        idle = sum(weight.size * max(0.0, 1 - chosen / weight.shape[0]) for weight in stacked)
    bits, hidden, vocab = _bits(config), parts.hidden_size, parts.vocab_size
    cache = _cache_bytes(values, hidden, parts.num_layers, 4 if bits == 32 else 2)
    return ModelShape(name, parameters, parameters - idle, bits, hidden, vocab, cache)


def _cache_bytes(values: Mapping[str, Any], hidden: int, layers: int, number: int) -> int:
    """Count the bytes of a token's keys and values, at most: some layers may keep none."""
    names = "num_attention_heads", "num_key_value_heads", "head_dim"
    found = map(values.get, names)
    heads, key_heads, size = (one if isinstance(one, int) else 0 for one in found)
    size = size or hidden // max(1, heads)
    return 2 * layers * (key_heads or heads) * size * number


def _format_count(count: float) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def _bits(config: Mapping[str, Any]) -> int:
    for key in ("quantization", "quantization_config"):
        quantization = config.get(key)
        if isinstance(quantization, Mapping) and isinstance(quantization.get("bits"), int):
            return min(BYTES, key=lambda known: abs(known - quantization["bits"]))
    dtypes = [config.get(key) for key in ("torch_dtype", "dtype")]
    return 32 if "float32" in dtypes else 16
