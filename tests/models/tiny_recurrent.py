"""What tiny models with recurrent layers need in their configs."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

# Gated delta nets.
DELTA_NET: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}

# Mamba-2; two groups of heads share keys and queries.
MAMBA_2: Config = {
    "conv_kernel": 4,
    "n_groups": 2,
    "state_size": 16,
    "ssm_state_size": 16,
    "time_step_limit": [0.001, 100.0],
    "time_step_rank": "auto",
    "use_bias": False,
    "use_conv_bias": True,
}

RECURRENT: dict[str, Config] = {
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "mamba2": {**MAMBA_2, "num_heads": 4},
    "nemotron_h": {
        **MAMBA_2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "hybrid_override_pattern": ["M", "*", "-", "M", "E"],
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_allow_neg_eigval": True,
    },
    "plamo2": {
        "hidden_size_per_head": 16,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
    },
    "qwen3_5": {"num_experts": 0},
}

# Families with layers that have a state instead of rows.
WITH_STATES = (
    "granitemoehybrid",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "plamo2",
    "prism_hadamard_qwen35",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
)

# Families without positions: the order of their tokens is in states and masks alone.
WITHOUT_POSITIONS = ("mamba2", "nemotron_h")

# What models with a vision tower need beside a language model's config.
PACKED = {"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16"}
WRAPPER_OVERRIDES: dict[str, Config] = {
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{**PACKED, "block": 512}],
        "text_config": {"intermediate_size": 512},
    },
    "qwen3_5_moe": {"text_config": {"num_experts": 8}},
}
