"""Tiny stock mlx-lm models with random weights, one for every supported architecture.

Lengths that position-dependent code compares with (the original length of a scaled rope, the period
of an attention scale, the length from which "dynamic" rope grows its base) are all `THRESHOLD`, and
the trees of the tests lie across it.
"""

import json
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.utils import _get_classes

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.target.architectures import SUPPORTED, WRAPPERS

Config = dict[str, Any]

VOCAB_SIZE = 96
THRESHOLD = 14
# Tokens of a sliding window; the prompt of the tests has more.
WINDOW = 8
# Numbers of a row that have a scale in common.
GROUP_SIZE = 32
SCALING_FACTOR = 4.0

# Gated delta nets.
DELTA_NET: Config = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip

# Mamba-2; two groups of heads share keys and queries.
MAMBA_2: Config = {
    "conv_kernel": 4, "n_groups": 2, "state_size": 16, "ssm_state_size": 16,
    "time_step_limit": [0.001, 100.0], "time_step_rank": "auto", "use_bias": False,
    "use_conv_bias": True,
}  # fmt: skip

# Short convolutions between layers with rows.
SHORT_CONVOLUTIONS: Config = {
    "num_hidden_layers": 3, "full_attn_idxs": [1], "conv_bias": True, "conv_L_cache": 3,
    "norm_eps": 1e-5,
}  # fmt: skip

# Model files take what they know from a config and ignore the rest, so most share this one.
COMMON: Config = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 56,
    "original_max_position_embeddings": THRESHOLD, "rope_theta": 100.0,
    "partial_rotary_factor": 0.5, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": True,
    # Mixtures of experts; the first layer is dense where the family has dense layers.
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_group": 2,
    "topk_group": 1,
    # Latent attention.
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 16,
    # Multipliers of the Granite and MiniCPM families.
    "logits_scaling": 0.5, "attention_multiplier": 0.3, "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7, "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0,
    # Windows, by the names of different families.
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "loop_window_size": WINDOW,
    **DELTA_NET,
}  # fmt: skip

# A layer with a window and one without; without this key most families have full layers only.
WINDOWED: Config = {"layer_types": ["sliding_attention", "full_attention"]}

# The last two layers attend to the rows of layers before, and each layer has inputs of its own.
SHARED_ROWS: Config = {
    "num_hidden_layers": 5,
    "layer_types": [*WINDOWED["layer_types"], *WINDOWED["layer_types"], "sliding_attention"],
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}  # fmt: skip

GPT: Config = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 64, "n_positions": 56}

OVERRIDES: dict[str, Config] = {
    "afm7": {"hidden_dim": 64, "num_layers": 3, "num_kv_reuse_layers": 1, "num_heads": 4,
        "num_kv_heads": 2, "hidden_dim_scale_factor": 1.0},
    "afmoe": {**WINDOWED, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "bailing_moe": {"use_qk_norm": True, "norm_head": True, "topk_group": 2},
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {"sliding_window_pattern": 2, "logit_scale": 0.5},
    "dbrx": {"d_model": 64, "n_layers": 2, "n_heads": 4, "attn_config": {"kv_n_heads": 2,
        "clip_qkv": 8.0, "rope_theta": 100.0}, "ffn_config": {"ffn_hidden_size": 32,
        "moe_num_experts": 8, "moe_top_k": 2}},
    "ernie4_5": {"use_bias": True, "tie_word_embeddings": True},
    "ernie4_5_moe": {"use_bias": False, "moe_num_experts": 8, "moe_k": 2,
        "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "exaone": {"num_layers": 2, "tie_word_embeddings": True},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": None},
    "exaone_moe": {**WINDOWED, "is_moe_layer": [False, True]},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 60.0},
    "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 50.0},
    "gemma3n": {"text_config": {**COMMON, **SHARED_ROWS, "model_type": "gemma3n_text",
        "rope_local_base_freq": 50.0, "final_logit_softcapping": 60.0,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0], "altup_num_inputs": 2,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
        "laurel_rank": 8}},
    "gemma4_text": {**SHARED_ROWS, "global_head_dim": 32, "enable_moe_block": True,
        "top_k_experts": 2},
    "glm": {"tie_word_embeddings": True},
    "glm4_moe": {"use_qk_norm": True, "rope_scaling": None},
    "gpt2": {**GPT, "n_ctx": 56},
    "gpt_bigcode": GPT,
    "gpt_neox": {"rotary_emb_base": 100, "rotary_pct": 0.5, "num_key_value_heads": 4},
    "gpt_oss": WINDOWED,
    "gptj": {**GPT, "rotary_dim": 8},
    "granite": {"tie_word_embeddings": True},
    "hunyuan": {"moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True,
        "use_qk_norm": True, "use_cla": True, "cla_share_factor": 2},
    "laguna": WINDOWED,
    "lille-130m": {"block_size": 56, "n_embd": 96, "n_head": 4, "n_kv_heads": 2, "n_layer": 2},
    "llama": {"rope_traditional": True},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity",
        "zero_expert_num": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "moe_topk": 2,
        "num_layers": 2, "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "llama4": {"num_hidden_layers": 5, "attention_chunk_size": WINDOW, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64, "use_qk_norm": True,
        "rope_scaling": None, "floor_scale": THRESHOLD, "attn_scale": 2.0},
    "llama4_text": {"intermediate_size_mlp": 64, "no_rope_layers": [1, 0], "use_qk_norm": True,
        "tie_word_embeddings": True},
    "mellum": WINDOWED,
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 50.0, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4,
        "swa_head_dim": 16, "swa_v_head_dim": 8, "attention_value_scale": 0.7},
    "minimax": {"shared_intermediate_size": 32, "rotary_dim": 8},
    "muse_glimmer": {**WINDOWED, "output_multiplier": 1.0},
    "nanbeige": {"num_loops": 2},
    "nanochat": {"num_key_value_heads": 4},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5},
    "nemotron-nas": {"num_hidden_layers": 4,
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}}]},
    "olmo3": WINDOWED,
    "openelm": {"num_transformer_layers": 2, "model_dim": 64, "ffn_dim_divisor": 32,
        "num_query_heads": [4, 6], "num_kv_heads": [2, 3], "ffn_multipliers": [1.0, 1.5],
        "rope_freq_constant": 100},
    "phi": {"num_key_value_heads": 4},
    "phixtral": {"num_vocab": VOCAB_SIZE, "model_dim": 64, "num_heads": 4, "num_layers": 2,
        "rotary_dim": 8},
    "plamo": {"n_shared_head": 2},
    "plamo3": {"sliding_window_pattern": 2},
    "qwen": {"kv_channels": 16},
    "seed_oss": {"attention_bias": True},
    "smollm3": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    "spark2_5": WINDOWED,
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": {"tie_word_embeddings": True},
    "step3p5": {**WINDOWED, "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4},
        "partial_rotary_factors": [1.0, 0.5], "moe_num_experts": 8, "moe_top_k": 2,
        "share_expert_dim": 32, "swiglu_limits": [0, 1.5]},
    "youtu_llm": {"tie_word_embeddings": True},
    # With recurrent layers.
    "baichuan_m1": {"sliding_window_layers": [1], "conv_window": 2},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16,
        "mamba_n_groups": 2, "mamba_rms_norm": True},
    "bailing_moe_v3": {"moe_shared_expert_intermediate_size": 32, "layer_group_size": 2,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    "gear": {"num_hidden_layers": 4, "layer_types": ["conv_mixer", "sliding_attention",
        "conv_mixer", "full_attention"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2,
        "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8,
        "mamba_expand": 2},
    "kimi_linear": {"num_hidden_layers": 3, "linear_attn_config": {"kda_layers": [1, 3],
        "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}, "model_max_length": 56,
        "num_experts_per_token": 2},
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
        "time_step_rank": 4},
    "recurrent_gemma": {"num_hidden_layers": 3, "conv1d_width": 4, "logits_soft_cap": 30.0,
        "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "granitemoehybrid": {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 32, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_n_groups": 2, "mamba_proj_bias": False, "mamba_conv_bias": True},
    "lfm2": {**SHORT_CONVOLUTIONS, "block_dim": 64, "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
    "lfm2_moe": {**SHORT_CONVOLUTIONS, "num_dense_layers": 1, "use_expert_bias": True},
    "mamba2": {**MAMBA_2, "num_heads": 4},
    "nemotron_h": {**MAMBA_2, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_proj_bias": False,
        "hybrid_override_pattern": ["M", "*", "-", "M", "E"],
        "moe_shared_expert_intermediate_size": 32},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"],
        "linear_allow_neg_eigval": True},
    "plamo2": {"hidden_size_per_head": 16, "mamba_d_state": 16, "mamba_num_heads": 4},
    "qwen3_5": {"num_experts": 0},
}  # fmt: skip

# Families with layers that have a state instead of rows.
WITH_STATES = (
    "baichuan_m1", "bailing_moe_v3", "falcon_h1", "gear", "granitemoehybrid", "jamba",
    "kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe", "mamba", "mamba2", "nemotron_h", "olmo_hybrid",
    "plamo2", "prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma",
)  # fmt: skip

# Families without positions: the order of their tokens is in states and masks alone.
WITHOUT_POSITIONS = ("jamba", "kimi_linear", "mamba", "mamba2", "nemotron_h")

# Keys that models with a vision tower need beside a language model's config.
PACKED = {"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16"}
WRAPPER_OVERRIDES: dict[str, Config] = {
    "prism_hadamard_qwen35": {"tensor_namespace": "mlx-vlm-qwen3_5", "quantization": {"bits": 2,
        "group_size": 128, "mode": "affine"}, "modules": [{**PACKED, "block": 512}],
        "text_config": {"intermediate_size": 512}},
    "qwen3_5_moe": {"text_config": {"num_experts": 8}},
}  # fmt: skip

# Families whose layers have windows or chunks, with what some of them need for it.
_WITHOUT_MORE = (
    "afmoe", "cohere2", "exaone_moe", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text",
    "gpt_oss", "iquestloopcoder", "laguna", "llama4", "mellum", "mimo_v2_flash", "muse_glimmer",
    "olmo3", "plamo3", "spark2_5", "step3p5",
)  # fmt: skip
WITH_WINDOWS: dict[str, Config] = {
    **{name: {} for name in _WITHOUT_MORE},
    "exaone4": {"sliding_window_pattern": "LG"},
    "llama": WINDOWED,
    "ministral3": WINDOWED,
    # This one has windows in masks alone.
    "smollm3": {**WINDOWED, "num_hidden_layers": 2, "no_rope_layers": [1, 0]},
}

# These read rope scaling, and the period of an attention scale, from ``rope_parameters``.
ROPE_PARAMETERS = ("ministral3", "mistral4", "qwen3_5")
# These have them for each type of layer.
NESTED_ROPE_PARAMETERS = ("gemma4_text", "laguna", "mellum", "spark2_5")

_RESCALED: Config = {
    "factor": SCALING_FACTOR, "original_max_position_embeddings": THRESHOLD, "mscale": 1.0,
    "mscale_all_dim": 0.5, "beta_fast": 8,
}  # fmt: skip
ROPE_SCALING: dict[str, Config] = {
    "default": {},
    "linear": {"factor": 2.5, "long_factor": 1.0},
    "dynamic": {"factor": 3.0, "alpha": 50.0},
    "llama3": {**_RESCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"factor": SCALING_FACTOR, "original_max_position_embeddings": THRESHOLD,
        "short_factor": 1.3, "long_factor": 2.1, "short_mscale": 1.1, "long_mscale": 1.2},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "mrope": {"factor": 1.0, "mrope_section": [2, 3, 3]},
}  # fmt: skip
ROPE_SCALING["su"] = ROPE_SCALING["longrope"]
for _yarn in ("yarn", "deepseek_yarn", "telechat3-yarn"):
    ROPE_SCALING[_yarn] = _RESCALED


def tiny_config(model_type: str, rope: str = "default") -> Config:
    if model_type in WRAPPERS:
        return wrapper_config(model_type, WRAPPERS[model_type][0], rope)
    return text_config(model_type, rope)


def text_config(model_type: str, rope: str = "default") -> Config:
    config = {**COMMON, **OVERRIDES.get(model_type, {}), "model_type": model_type}
    scaling = {"type": rope, "rope_type": rope, **ROPE_SCALING[rope]}
    if rope == "dynamic":
        config["max_position_embeddings"] = THRESHOLD
    if model_type in ROPE_PARAMETERS:
        scaling = {**scaling, "rope_theta": 100.0, "llama_4_scaling_beta": 0.8}
        scaling["original_max_position_embeddings"] = THRESHOLD
        return {**config, "rope_parameters": scaling}
    if model_type in NESTED_ROPE_PARAMETERS:
        types = {"sliding_attention": {"rope_theta": 50.0}, "full_attention": {"rope_theta": 100.0}}
        nested = {name: {**scaling, **own} for name, own in types.items()}
        return {**config, "rope_parameters": nested}
    return config if rope == "default" else {**config, "rope_scaling": scaling}


def wrapper_config(model_type: str, text_type: str, rope: str = "default") -> Config:
    """The config of a model with a vision tower."""
    extra = WRAPPER_OVERRIDES.get(model_type, {})
    inner = {**text_config(text_type, rope), **extra.get("text_config", {})}
    return {"vocab_size": VOCAB_SIZE, **extra, "model_type": model_type, "text_config": inner}


def resized(config: Config, **sizes: Any) -> Config:
    """A config with other sizes, those of its language model if it has one inside."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **sizes}}
    return {**config, **sizes}


def long_config(model_type: str) -> Config:
    """The config of a model that has no limit to speak of."""
    return resized(tiny_config(model_type), max_position_embeddings=4096)


def windowed_config(model_type: str, window: int = WINDOW) -> Config:
    """The config of a model that has a layer with a window, and no limit to speak of."""
    config = {**long_config(model_type), **WITH_WINDOWS[model_type]}
    keys = "sliding_window", "sliding_window_size", "loop_window_size", "attention_chunk_size"
    # Llama 4's attention scale has a period no shorter than a tree.
    return resized(config, **dict.fromkeys(keys, window), floor_scale=500)


def wide_config(model_type: str) -> dict[str, Any]:
    """A config whose heads are as large as a group, and no limit to speak of."""
    sizes = {"head_dim": GROUP_SIZE, "hidden_size": 128, "n_embd": 128, "v_head_dim": 32}
    sizes |= {"qk_rope_head_dim": 32, "max_position_embeddings": 4096, "n_positions": 400}
    if model_type == "llama4":
        return resized(windowed_config(model_type), **sizes)
    return resized(tiny_config(model_type, main_rope(model_type)), **sizes)


def main_rope(model_type: str) -> str:
    """The kind of rope scaling that one test per architecture uses."""
    kinds = SUPPORTED[model_type]
    return next((kind for kind in ("yarn", "dynamic") if kind in kinds), kinds[-1])


# Weights that were drawn, by config and seed.
_DRAWN: dict[tuple[str, int], list[tuple[str, mx.array]]] = {}


def build(config: Config, seed: int = 0) -> nn.Module:
    """A stock model whose random float32 weights make tokens, positions and experts matter."""
    key = json.dumps(config), seed  # before mlx-lm changes the config
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if key not in _DRAWN:
        if len(_DRAWN) > 300:
            _DRAWN.clear()
        _DRAWN[key] = _random_weights(model, mx.random.key(seed))
        mx.eval(_DRAWN[key])
    # Arrays of its own, as a test may change them in place.
    model.update(tree_unflatten([(name, mx.array(one)) for name, one in _DRAWN[key]]))
    model.eval()
    mx.eval(model.parameters())
    return model


def _random_weights(model: nn.Module, key: mx.array) -> list[tuple[str, mx.array]]:
    weights = []
    for name, value in named_parameters(model).items():
        key, here = mx.random.split(key)
        noise = mx.random.normal(value.shape, key=here)
        if value.dtype == mx.uint32:
            weights.append((name, mx.random.randint(0, 2**32, value.shape, mx.uint32, key=here)))
        elif value.ndim < 2:
            # Gates of recurrences lie between 0 and 1, near neither.
            centre = {"bias": 0.0, "_log": -1.0}.get(name[-4:], 1.0)
            weights.append((name, centre + 0.2 * noise))
        elif value.shape[0] in (VOCAB_SIZE, COMMON["max_position_embeddings"]):
            weights.append((name, noise))
        else:
            weights.append((name, 2.0 * noise / math.sqrt(value.shape[-1])))
    return weights
