"""YaRN (arXiv 2309.00071) as transformers computes it, for heads that were trained there.

mlx-lm always rounds the range of dimensions that are partly interpolated, and has no
``attention_factor``. A target keeps the embedding that mlx-lm gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.rope_utils import YarnRoPE

from mlx_redrafter.checks import is_number
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.layer_sizes import LayerSizes

# Keys of numbers that every scaling has.
NUMBERS = ("factor", "original_max_position_embeddings")


def complete_yarn(rope: Any, config: LayerSizes) -> None:
    """Give a rotary embedding of mlx-lm, in place, the frequencies and factor of transformers.

    Embeddings without YaRN stay as they are. A number of the scaling that is missing or not above 0
    raises ConfigError.
    """
    if not isinstance(rope, YarnRoPE):
        return
    scaling = config.rope_scaling or {}
    is_given = scaling.get("attention_factor") is not None
    for key in (*NUMBERS, "attention_factor") if is_given else NUMBERS:
        value: Any = scaling.get(key)
        if not is_number(value) or not value > 0:
            raise ConfigError(f"rope_scaling {key} must be a number above 0, got {value!r}")
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
