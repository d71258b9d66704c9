"""Heads under their published names and configs, with weights from a seed.

`tests.golden.record_heads` runs them in the packages that publish such heads, and stores what those
compute. The tests load the same files here.

Axes: H hidden size, C states of the target, n tokens.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, np.ndarray]
HIDDEN, VOCAB, DRAFT_VOCAB, NUM_TOKENS = 32, 64, 40, 14

# Number of drafts after each text in a recording.
NUM_DRAFTS = 3
YARN = {
    "rope_type": "yarn", "rope_theta": 200.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False, "attention_factor": 1.3,
}  # fmt: skip
LAYER = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_DEFAULT = {"rope_type": "default", "rope_theta": 100.0}


def _layer(model_type: str, kinds: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Describe layers: "s" attends to a window of 5 tokens, "f" to all."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    return {
        **LAYER, "model_type": model_type, "num_hidden_layers": len(kinds),
        "layer_types": [names[kind] for kind in kinds], "sliding_window": 5,
        "use_sliding_window": "s" in kinds, "rope_parameters": dict(rope),
    }  # fmt: skip


# Heads of speculators by name: the config.
SPECULATORS: dict[str, dict[str, Any]] = {
    "windows": {"speculators_model_type": "eagle3", "transformer_layer_config": _layer("qwen3",
        "sf", _DEFAULT), "norm_before_residual": True, "norm_output": True, "fc_norm": True},
    "yarn": {"speculators_model_type": "eagle3", "transformer_layer_config": _layer("llama", "s",
        YARN), "norm_before_fc": True, "embed_requires_grad": True},
    "parallel": {"speculators_model_type": "peagle", "transformer_layer_config": _layer("qwen3",
        "ff", _DEFAULT), "mask_token_id": 7, "embed_requires_grad": True,
        "norm_before_residual": True,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 1 + NUM_DRAFTS}]}},
}  # fmt: skip
SPECULATORS["parallel windows"] = {
    **SPECULATORS["parallel"],
    "transformer_layer_config": _layer("qwen3", "sf", _DEFAULT),
}
for _config in SPECULATORS.values():
    _config |= {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}


# MTP modules in folders of their own, as mlx-vlm's splitters write them: family and mode of codes.
SIDECARS: dict[str, tuple[str, str | None]] = {
    "nemotron_h": ("nemotron_h", None), "nemotron_h mxfp8": ("nemotron_h", "mxfp8"),
    "qwen3_5_moe": ("qwen3_5_moe", None), "qwen3_5_moe mxfp4": ("qwen3_5_moe", "mxfp4"),
    "qwen3_5_moe nvfp4": ("qwen3_5_moe", "nvfp4"),
}  # fmt: skip


_ASSISTANT_LAYERS = {
    "model_type": "gemma4_text", "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 3, "num_kv_shared_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "vocab_size": 96,
    "rms_norm_eps": 1e-6, "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0,
        "partial_rotary_factor": 0.25}},
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "use_double_wide_mlp": False, "enable_moe_block": False, "attention_k_eq_v": False,
    "max_position_embeddings": 512,
}  # fmt: skip
# Gemma 4 assistants by name: the config. Their target has a hidden size of 64.
ASSISTANTS: dict[str, dict[str, Any]] = {
    "assistant": {"model_type": "gemma4_assistant"},
    "assistant with clusters": {"model_type": "gemma4_unified_assistant",
        "use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3},
}  # fmt: skip
for _config in ASSISTANTS.values():
    _config |= {"backbone_hidden_size": 64, "text_config": _ASSISTANT_LAYERS}


def seeded(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Tensors:
    """Draw float32 weights: around 1 for norms, of the usual scale for matrices."""
    random = np.random.RandomState(seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        drawn = random.standard_normal(shape)
        is_norm = len(shape) == 1 and "norm" in name
        drawn = 1 + 0.2 * drawn if is_norm else drawn * shape[-1] ** -0.5
        weights[name] = drawn.astype(np.float32)
    return weights


def mlp_shapes(prefix: str, hidden: int, width: int) -> Shapes:
    """Shapes of an MLP with a gate."""
    wide = dict.fromkeys(("gate_proj", "up_proj"), (width, hidden))
    return {f"{prefix}.{n}.weight": s for n, s in {**wide, "down_proj": (hidden, width)}.items()}


def layer_shapes(layer: Mapping[str, Any], entering: int) -> Shapes:
    """Shapes of decoder layers, of which the first one reads rows of ``entering`` numbers."""
    heads, keys = layer["num_attention_heads"], layer["num_key_value_heads"]
    size, width = layer["head_dim"], layer["intermediate_size"]
    shapes: Shapes = {}
    for i in range(layer["num_hidden_layers"]):
        inputs = HIDDEN if i else entering
        own = {
            "self_attn.q_proj": (heads * size, inputs), "self_attn.k_proj": (keys * size, inputs),
            "self_attn.v_proj": (keys * size, inputs), "self_attn.o_proj": (HIDDEN, heads * size),
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        if layer["model_type"] == "qwen3":
            own |= {f"self_attn.{x}_norm": (size,) for x in "qk"}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in own.items()}
        shapes |= mlp_shapes(f"layers.{i}.mlp", HIDDEN, width)
    return shapes


def eagle_3_shapes(layer: Mapping[str, Any], flags: Mapping[str, Any]) -> Shapes:
    """Shapes of an EAGLE-3 head that joins three states of the target."""
    shapes = layer_shapes(layer, 2 * HIDDEN) | {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "layers.0.hidden_norm.weight": (HIDDEN,),
    }
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * HIDDEN,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}
    return shapes


def eagle_3_tensors(shapes: Shapes, seed: int) -> Tensors:
    """Draw the tensors of an EAGLE-3 head, and the token ids of its rows as it stores them."""
    tensors = seeded(shapes, seed)
    tensors["lm_head.weight"] *= 3
    used = np.sort(np.random.RandomState(seed).permutation(VOCAB)[:DRAFT_VOCAB])
    return tensors | {"d2t": used - np.arange(DRAFT_VOCAB), "t2d": np.isin(np.arange(VOCAB), used)}


def speculators_head(name: str) -> Tensors:
    """Draw the tensors of a head of speculators by their published names."""
    config = SPECULATORS[name]
    shapes = eagle_3_shapes(config["transformer_layer_config"], config)
    shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    if config["speculators_model_type"] == "peagle":
        shapes["mask_hidden"] = (1, 1, 3 * HIDDEN)
    return eagle_3_tensors(shapes, 3)


def text_and_states() -> tuple[list[int], np.ndarray]:
    """Draw a text, and three states after each of its tokens but the last, shape (n - 1, 3 H)."""
    random = np.random.RandomState(5)
    text = random.randint(0, VOCAB, NUM_TOKENS).tolist()
    return text, random.standard_normal((NUM_TOKENS - 1, 3 * HIDDEN)).astype(np.float32)


def assistant_tensors(name: str) -> Tensors:
    """Draw the tensors of a Gemma 4 assistant by their published names."""
    config = ASSISTANTS[name]
    text = config["text_config"]
    hidden, width, vocab = (text[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "pre_projection.weight": (hidden, 2 * config["backbone_hidden_size"]),
        "post_projection.weight": (config["backbone_hidden_size"], hidden),
    }
    for i, kind in enumerate(text["layer_types"]):
        size = text["global_head_dim" if kind == "full_attention" else "head_dim"]
        rows = text["num_attention_heads"] * size
        own = f"model.layers.{i}"
        shapes |= {
            f"{own}.self_attn.q_proj.weight": (rows, hidden),
            f"{own}.self_attn.q_norm.weight": (size,),
            f"{own}.self_attn.o_proj.weight": (hidden, rows),
            f"{own}.layer_scalar": (1,),
            **mlp_shapes(f"{own}.mlp", hidden, width),
        }
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{own}.{norm}_layernorm.weight"] = (hidden,)
    is_clustered = config.get("use_ordered_embeddings", False)
    if is_clustered:
        shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], hidden)
    tensors = seeded(shapes, 7)
    if is_clustered:
        ordering = np.random.RandomState(8).permutation(vocab)
        tensors["masked_embedding.token_ordering"] = ordering.astype(np.int64)
    return tensors


def assistant_inputs(length: int) -> tuple[Tensors, np.ndarray]:
    """Draw keys and values by kind of attention, shape (2, 1, G, length, D), and NUM_DRAFTS inputs.

    An input is a scaled embedding and a state side by side, shape (2 H,); only the first state is
    read.
    """
    random = np.random.RandomState(9)
    entries = {}
    for kind, size in (("full_attention", 32), ("sliding_attention", 16)):
        entries[kind] = random.standard_normal((2, 1, 2, length, size)).astype(np.float32)
    return entries, random.standard_normal((NUM_DRAFTS, 128)).astype(np.float32)


def pairs(hidden_size: int) -> np.ndarray:
    """Draw states and embeddings of an MTP module, float32, shape (2, 6, H)."""
    random = np.random.RandomState(6)
    return random.standard_normal((2, 6, hidden_size)).astype(np.float32)
