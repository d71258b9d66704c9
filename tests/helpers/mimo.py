"""A tiny MiMo with its MTP module, and its folder as it is published.

Axes: H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import mimo

from mlx_redrafter.checkpoint_files import named_parameters

CONFIG: dict[str, Any] = {
    "model_type": "mimo", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 64,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "num_nextn_predict_layers": 1,
}  # fmt: skip
PREFIX = "model.mtp_layers.0."


def module_shapes(config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """The published names of an MTP module and their shapes, written down here on purpose."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    rows = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return {
        "token_layernorm.weight": (hidden,),
        "hidden_layernorm.weight": (hidden,),
        "input_proj.weight": (hidden, 2 * hidden),
        "final_layernorm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (rows, hidden),
        "self_attn.k_proj.bias": (rows,),
        "self_attn.v_proj.weight": (rows, hidden),
        "self_attn.v_proj.bias": (rows,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
    }


def module_tensors(config: Mapping[str, Any] = CONFIG) -> dict[str, mx.array]:
    """Random float32 weights of an MTP module under their published names."""
    keys = mx.random.split(mx.random.key(8), 32)
    return {
        PREFIX + name: mx.random.normal(shape, scale=shape[-1] ** -0.5, key=key)
        for (name, shape), key in zip(module_shapes(config).items(), keys, strict=False)
    }


def tiny_mimo(seed: int = 4, config: Mapping[str, Any] = CONFIG) -> nn.Module:
    """A random float32 target."""
    model = mimo.Model(mimo.ModelArgs.from_dict(dict(config)))
    keys = iter(mx.random.split(mx.random.key(seed), 64))

    def drawn(name: str, weight: mx.array) -> mx.array:
        spread = 6.0 if name == "lm_head.weight" else 1.0
        scale = spread * weight.shape[-1] ** -0.5
        return mx.random.normal(weight.shape, scale=scale, key=next(keys))

    weights = named_parameters(model)
    model.load_weights([(n, drawn(n, w) if w.ndim == 2 else w) for n, w in weights.items()])
    mx.eval(model.parameters())
    model.eval()
    return model


def write(
    folder: Path, tensors: Mapping[str, mx.array], config: Mapping[str, Any] = CONFIG
) -> Path:
    """Write tensors and a config."""
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tensors))
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder
