"""What tiny models with recurrent layers need in their configs."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

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

RECURRENT: dict[str, Config] = {
    "baichuan_m1": {"sliding_window_layers": [1], "conv_window": 2},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16,
        "mamba_n_groups": 2, "mamba_rms_norm": True},
    "bailing_moe_v3": {"moe_shared_expert_intermediate_size": 32, "n_group": 2, "topk_group": 1,
        "layer_group_size": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16},
    "gear": {"num_hidden_layers": 4, "layer_types": ["conv_mixer", "sliding_attention",
        "conv_mixer", "full_attention"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2,
        "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8,
        "mamba_expand": 2},
    "kimi_linear": {"num_hidden_layers": 3, "linear_attn_config": {"kda_layers": [1, 3],
        "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}, "model_max_length": 56,
        "num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1},
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
        "time_step_rank": 4},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_bias": False, "conv1d_width": 4,
        "logits_soft_cap": 30.0, "attention_window_size": 8, "block_types": ["recurrent",
        "attention"]},
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
    "plamo2": {"hidden_size_per_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4,
        "mamba_num_heads": 4},
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

# What models with a vision tower need beside a language model's config.
PACKED = {"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16"}
WRAPPER_OVERRIDES: dict[str, Config] = {
    "prism_hadamard_qwen35": {"tensor_namespace": "mlx-vlm-qwen3_5", "quantization": {"bits": 2,
        "group_size": 128, "mode": "affine"}, "modules": [{**PACKED, "block": 512}],
        "text_config": {"intermediate_size": 512}},
    "qwen3_5_moe": {"text_config": {"num_experts": 8}},
}  # fmt: skip
