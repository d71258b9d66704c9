"""Tiny models of all families with MTP modules, and their modules as they are published.

Axes: H hidden size, E experts, I their width.
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

from mlx_redrafter.checkpoint_files import write_checkpoint
from tests.helpers.models import randomised
from tests.helpers.published_heads import Shapes, mlp_shapes
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
        values |= {"intermediate_size": 48, "moe_intermediate_size": 32, "n_routed_experts": 4}
        values |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
        values |= {"moe_shared_expert_intermediate_size": 40, "norm_topk_prob": True}
        values |= {"attention_bias": False, "mlp_bias": False, "layer_norm_epsilon": 1e-5}
    elif model_type != "glm4_moe" and not model_type.startswith("qwen"):
        values |= {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-6}
    return values


def _attention(config: Mapping[str, Any], has_gate: bool, has_bias: bool) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim", hidden // heads)
    rows = config["num_key_value_heads"] * size
    shapes: Shapes = {"o_proj.weight": (hidden, heads * size)}
    if config["model_type"] != "mimo":
        shapes |= {"q_norm.weight": (size,), "k_norm.weight": (size,)}
    for name, width in (("q", heads * size * (2 if has_gate else 1)), ("k", rows), ("v", rows)):
        shapes[f"{name}_proj.weight"] = (width, hidden)
        if has_bias:
            shapes[f"{name}_proj.bias"] = (width,)
    return shapes


def _latent_attention(config: Mapping[str, Any]) -> Shapes:
    hidden, heads, value = (config[k] for k in ("hidden_size", "num_attention_heads", "v_head_dim"))
    rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    queries, keys = config["q_lora_rank"], config["kv_lora_rank"]
    shapes: Shapes = {
        "q_a_proj": (queries, hidden), "q_a_layernorm": (queries,),
        "q_b_proj": (heads * (nope + rope), queries),
        "kv_a_proj_with_mqa": (keys + rope, hidden), "kv_a_layernorm": (keys,),
        "kv_b_proj": (heads * (nope + value), keys), "o_proj": (hidden, heads * value),
    }  # fmt: skip
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _mimo_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    names = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    return {
        **{f"{name}.weight": (hidden,) for name in names},
        "input_proj.weight": (hidden, 2 * hidden),
        **{f"self_attn.{n}": s for n, s in _attention(config, False, True).items()},
        **mlp_shapes("mlp", hidden, config["intermediate_size"]),
    }


def _deepseek_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    vocab, num = config["vocab_size"], config["n_routed_experts"]
    if config["model_type"] == "glm4_moe":
        attention = _attention(config, False, config["attention_bias"])
    else:
        attention = _latent_attention(config)
    shapes: Shapes = {
        "embed_tokens.weight": (vocab, hidden), "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,), "shared_head.head.weight": (vocab, hidden),
        "mlp.gate.weight": (num, hidden), "mlp.gate.e_score_correction_bias": (num,),
        **mlp_shapes("mlp.shared_experts", hidden, width * config["n_shared_experts"]),
        **{f"self_attn.{name}": shape for name, shape in attention.items()},
    }  # fmt: skip
    for e in range(num):
        shapes |= mlp_shapes(f"mlp.experts.{e}", hidden, width)
    return shapes


def _qwen_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, num = config["hidden_size"], config.get("num_experts", 0)
    block = {f"self_attn.{n}": s for n, s in _attention(config, True, False).items()}
    if num:
        width = config["moe_intermediate_size"]
        block |= {"mlp.gate.weight": (num, hidden), "mlp.shared_expert_gate.weight": (1, hidden)}
        block |= mlp_shapes("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
        if config["model_type"] == "qwen3_5_moe":
            block["mlp.experts.gate_up_proj"] = (num, 2 * width, hidden)
            block["mlp.experts.down_proj"] = (num, hidden, width)
        else:
            for e in range(num):
                block |= mlp_shapes(f"mlp.experts.{e}", hidden, width)
    else:
        block |= mlp_shapes("mlp", hidden, config["intermediate_size"])
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {
        "fc.weight": (hidden, 2 * hidden),
        **{f"{name}.weight": (hidden,) for name in norms},
        **{f"layers.0.{name}": shape for name, shape in block.items()},
    }


def _nemotron_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, num = config["hidden_size"], config["n_routed_experts"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["head_dim"]
    shapes: Shapes = {
        "0.enorm.weight": (hidden,), "0.hnorm.weight": (hidden,),
        "0.eh_proj.weight": (hidden, 2 * hidden), "0.norm.weight": (hidden,),
        "0.mixer.q_proj.weight": (heads * size, hidden),
        "0.mixer.k_proj.weight": (keys * size, hidden),
        "0.mixer.v_proj.weight": (keys * size, hidden),
        "0.mixer.o_proj.weight": (hidden, heads * size), "1.norm.weight": (hidden,),
        "1.final_layernorm.weight": (hidden,), "1.mixer.gate.weight": (num, hidden),
        "1.mixer.gate.e_score_correction_bias": (num,),
    }  # fmt: skip
    widths = {f"experts.{e}": config["moe_intermediate_size"] for e in range(num)}
    widths["shared_experts"] = config["moe_shared_expert_intermediate_size"]
    for name, width in widths.items():
        shapes[f"1.mixer.{name}.up_proj.weight"] = (width, hidden)
        shapes[f"1.mixer.{name}.down_proj.weight"] = (hidden, width)
    return {f"layers.{name}": shape for name, shape in shapes.items()}


def prefix_of(config: Mapping[str, Any]) -> str:
    """What the published names begin with."""
    model_type = config["model_type"]
    if model_type == "mimo":
        return MIMO_PREFIX
    has_own = model_type.startswith(("qwen", "nemotron"))
    return "mtp." if has_own else f"model.layers.{config['num_hidden_layers']}."


def module_tensors(config: Mapping[str, Any] = MIMO) -> dict[str, mx.array]:
    """Random float32 weights of an MTP module under their published names."""
    is_qwen = config["model_type"].startswith("qwen")
    offset = 0.0 if is_qwen else 1.0
    if config["model_type"] == "nemotron_h":
        shapes = _nemotron_shapes(config)
    else:
        others = _mimo_shapes if config["model_type"] == "mimo" else _deepseek_shapes
        shapes = _qwen_shapes(config) if is_qwen else others(config)
        inner = "layers.0." if is_qwen else ""
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{inner}{name}.weight"] = (config["hidden_size"],)
    keys = mx.random.split(mx.random.key(8), len(shapes))
    return {
        prefix_of(config) + name: mx.random.normal(shape, scale=shape[-1] ** -0.5, key=key)
        + (offset if "norm" in name else 0.0)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
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
        start = prefix_of(config)
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
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        if self.is_mimo:  # as in vLLM's ``mimo_mtp.py``
            names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        if self.is_qwen:
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        parts = [self.norm(e, names[0]), self.norm(h, names[1])]
        joined = torch.cat(parts[::-1] if self.is_mimo else parts, dim=-1)
        x = (joined @ self.weights[f"{names[2]}.weight"].T)[None]
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
        normed = self.norm(y, names[3])
        return normed, normed if self.is_qwen or self.is_mimo else y
