"""Random models of each kind of prompt cache, small enough for contexts of 30,000 tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

VOCAB_SIZE = 4096
# Context of the models, in tokens.
CONTEXT = 1 << 16
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
_HYBRID: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
# Configs by the kind of cache.
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {**_SIZES, "model_type": "llama", "num_hidden_layers": 2},
    "quantised": {**_SIZES, "model_type": "llama", "num_hidden_layers": 2},
    "windows": {
        **_SIZES,
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 32,
    },
    "hybrid": {"model_type": "qwen3_5", "text_config": {**_HYBRID, "model_type": "qwen3_5"}},
}


def make_model(kind: str) -> nn.Module:
    """Make a model with random weights, the same at every call."""
    mx.random.seed(0)
    config = CONFIGS[kind]
    model_class, arguments = _get_classes(config)
    model: nn.Module = model_class(arguments.from_dict(config))
    mx.eval(model.parameters())
    model.eval()
    return model
