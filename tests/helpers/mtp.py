"""Tiny models of all families with MTP modules, and their modules as they are published.

Axes: n tokens, H hidden size.
"""

import copy
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import mimo

from mlx_redrafter.checkpoint_files import named_parameters, write_checkpoint
from mlx_redrafter.proposers.mtp.families import model_of_layers
from tests.helpers.models import randomised
from tests.helpers.published_heads import Shapes, seeded
from tests.models.tiny_models import tiny_config

# The config of a tiny MiMo, and what the names of its module begin with.
MIMO: dict[str, Any] = {
    "model_type": "mimo", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 64,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "num_nextn_predict_layers": 1,
}  # fmt: skip
MIMO_PREFIX = "model.mtp_layers.0."
# Classes of the families in transformers.
TORCH_NAMES = {
    "mimo": "Qwen2", "deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_next": "Qwen3Next",
}  # fmt: skip
PARTS = ("gate_proj", "up_proj", "down_proj")


def family_config(model_type: str) -> dict[str, Any]:
    """The config of a tiny model of one of these families."""
    if model_type == "mimo":
        return MIMO
    config = dict(tiny_config(model_type))
    values = dict(config.get("text_config", config))
    values |= {"model_type": model_type, "vocab_size": 64, "num_key_value_heads": 4}
    if "qwen3_5" in model_type:  # mlx-lm changes the object that it is given
        rope = {"type": "default", "rope_type": "default", "mrope_section": [2, 1, 1]}
        rope |= {"rope_theta": 100.0, "partial_rotary_factor": 0.5}
        values["rope_parameters"] = rope
    elif model_type == "nemotron_h":
        values |= {"hybrid_override_pattern": ["M", "E", "*"], "num_key_value_heads": 2}
        values |= {"mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1}
        values |= {"intermediate_size": 48, "n_routed_experts": 4, "n_group": 1, "mlp_bias": False}
        values |= {"moe_shared_expert_intermediate_size": 40}
    elif model_type != "glm4_moe" and not model_type.startswith("qwen"):
        values |= {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-6}
    return values


def _names(config: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Published names: the norms of embedding and state, what joins both, and the last norm."""
    if config["model_type"] == "mimo":  # as in vLLM's ``mimo_mtp.py``
        return "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"
    if config["model_type"].startswith("qwen"):
        return "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
    if config["model_type"] == "nemotron_h":
        return "layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.1.final_layernorm"
    return "enorm", "hnorm", "eh_proj", "shared_head.norm"


def _layer_shapes(config: Mapping[str, Any]) -> Shapes:
    """Shapes of the layers, which mlx-lm names as published except experts and latent attention."""
    shapes: Shapes = {}
    for number, layer in enumerate(model_of_layers(config).layers):
        parameters = named_parameters(layer).items()
        shapes |= {f"layers.{number}.{name}": tensor.shape for name, tensor in parameters}
    for name in [name for name in shapes if "switch_mlp" in name]:
        (num, rows, columns), own = shapes.pop(name), name.replace("switch_mlp", "experts")
        own = own.replace("fc1", "up_proj").replace("fc2", "down_proj")
        if config["model_type"] != "qwen3_5_moe":
            shapes |= {own.replace("experts", f"experts.{e}"): (rows, columns) for e in range(num)}
        elif "gate" in own:
            shapes[own.replace("gate_proj.weight", "gate_up_proj")] = (num, 2 * rows, columns)
        elif "down" in own:
            shapes[own.removesuffix(".weight")] = (num, rows, columns)
    attention = "layers.0.self_attn"
    if f"{attention}.embed_q.weight" in shapes:
        heads, rank, keys = shapes.pop(f"{attention}.embed_q.weight")
        _, values, _ = shapes.pop(f"{attention}.unembed_out.weight")
        shapes[f"{attention}.kv_b_proj.weight"] = (heads * (keys + values), rank)
    return shapes


def prefix_of(config: Mapping[str, Any]) -> str:
    """What the published names begin with."""
    model_type = config["model_type"]
    if model_type == "mimo":
        return MIMO_PREFIX
    has_own = model_type.startswith(("qwen", "nemotron"))
    return "mtp." if has_own else f"model.layers.{config['num_hidden_layers']}."


def module_tensors(config: Mapping[str, Any] = MIMO) -> dict[str, mx.array]:
    """Random float32 weights of an MTP module under their published names."""
    hidden, has_layers = config["hidden_size"], prefix_of(config) == "mtp."
    *norms, join, last = (f"{name}.weight" for name in _names(config))
    shapes = {**dict.fromkeys((*norms, last), (hidden,)), join: (hidden, 2 * hidden)}
    for name, shape in _layer_shapes(config).items():
        shapes[name if has_layers else name.removeprefix("layers.0.")] = shape
    if last.startswith("shared_head"):  # which the target has, too
        tables = ("embed_tokens.weight", "shared_head.head.weight")
        shapes |= dict.fromkeys(tables, (config["vocab_size"], hidden))
    offset = float(config["model_type"].startswith("qwen"))
    return {
        prefix_of(config) + name: mx.array(drawn) - (offset if "norm" in name else 0.0)
        for name, drawn in seeded(shapes, 8).items()
    }


def tiny_mimo(config: Mapping[str, Any] = MIMO) -> nn.Module:
    model = mimo.Model(mimo.ModelArgs.from_dict(dict(config)))
    return randomised(model, seed=4, spread=6.0)


def write(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any] = MIMO) -> Path:
    """Write a published folder, one of PyTorch."""
    arrays = {name: mx.array(tensor) for name, tensor in tensors.items()}
    write_checkpoint(folder, dict(config), arrays, framework="pt")
    return folder


class TorchModule:
    """A module by the published equations and names, its decoder layer that of transformers."""

    def __init__(self, torch: Any, config: Mapping[str, Any], tensors: Mapping[str, mx.array]):
        self.torch, self.eps = torch, config["rms_norm_eps"]
        model_type = config["model_type"]
        self.is_qwen = model_type.startswith("qwen")
        self.names, start = _names(config), prefix_of(config)
        self.weights = {
            n.removeprefix(start): torch.from_numpy(np.array(t)) for n, t in tensors.items()
        }
        self.is_mimo = model_type == "mimo"
        kind = "qwen2" if self.is_mimo else model_type
        package = f"transformers.models.{kind}"
        modeling = importlib.import_module(f"{package}.modeling_{kind}")
        configuration = importlib.import_module(f"{package}.configuration_{kind}")
        name = TORCH_NAMES[model_type]
        text = "Text" if model_type.startswith("qwen3_5") else ""
        own = {key: copy.deepcopy(v) for key, v in config.items() if key != "model_type"}
        own |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
        own |= {"mlp_layer_types": ["sparse"]} if model_type == "glm4_moe_lite" else {}
        own |= {"layer_types": ["full_attention"]} if self.is_qwen else {}
        made = getattr(configuration, f"{name}{text}Config")(**own)
        made._attn_implementation = "eager"
        made._experts_implementation = "eager"
        self.rope = getattr(modeling, f"{name}{text}RotaryEmbedding")(made)
        self.layer = getattr(modeling, f"{name}DecoderLayer")(made, 0).eval()
        inner = "layers.0." if self.is_qwen else ""
        block = {n.removeprefix(inner): t for n, t in self.weights.items()}
        expected = self.layer.state_dict()
        if "mlp.experts.gate_up_proj" in expected and "mlp.experts.0.up_proj.weight" in block:
            num = len(expected["mlp.experts.gate_up_proj"])
            gates, ups, downs = (
                torch.stack([block[f"mlp.experts.{e}.{part}.weight"] for e in range(num)])
                for part in PARTS
            )
            block["mlp.experts.gate_up_proj"] = torch.cat([gates, ups], dim=1)
            block["mlp.experts.down_proj"] = downs
        self.layer.load_state_dict({n: block[n] for n in expected}, strict=True)

    def norm(self, x: Any, name: str) -> Any:
        """An RMS norm, whose weights Qwen stores minus one."""
        scale = self.torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * (self.weights[f"{name}.weight"] + (1.0 if self.is_qwen else 0.0))

    def __call__(self, pairs: np.ndarray) -> tuple[Any, Any]:
        """Inputs of the head, and what is fed back, for pairs of h and e, shape (n, 2 H)."""
        torch = self.torch
        h, e = (part.float() for part in torch.from_numpy(pairs).chunk(2, dim=-1))
        embedding, hidden, join, last = self.names
        parts = [self.norm(e, embedding), self.norm(h, hidden)]
        joined = torch.cat(parts[::-1] if self.is_mimo else parts, dim=-1)
        x = (joined @ self.weights[f"{join}.weight"].T)[None]
        n = x.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        positions = torch.arange(n)[None]
        with torch.no_grad():
            y = self.layer(
                x,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=self.rope(x, positions),
            )[0]
        normed = self.norm(y, last)
        return normed, normed if self.is_qwen or self.is_mimo else y
