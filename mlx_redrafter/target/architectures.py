"""Tables of mlx-lm's models: where their parts are, and why some are not supported.

Support is an allow-list: a model type with a kind of rope scaling is here when the parity tests
compare its trees with token-by-token decoding. The rest is refused by name and reason. Model types
are mlx-lm's file names, which several names in a ``config.json`` may stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_redrafter.target.hooks import (
    Hook,
    attend_in_chunks,
    embed_tree_positions,
    mask_groups,
    rotate_at_tree_positions,
    rotate_with_dynamic_base,
    scale_at_tree_positions,
)
from mlx_redrafter.target.level_hooks import follow_levels
from mlx_redrafter.target.recurrent_hooks import (
    convolve_branches,
    convolve_pairs,
    convolve_short,
    follow_branches,
    update_delta_rule,
    update_state_space,
)

Config = Mapping[str, Any]

# Kinds of rope scaling, as ``type`` or ``rope_type`` names them in a config.
UNSCALED = ("default",)
LINEAR = (*UNSCALED, "linear")
YARN = ("yarn", "deepseek_yarn", "telechat3-yarn")
# What mlx-lm's `initialize_rope` knows; model files that read no rope scaling take all of it too.
ALL_ROPES = (*LINEAR, "dynamic", "llama3", *YARN, "longrope", "proportional", "mrope")

# Hooks by class of rotary embedding; None for a class without positions.
ROPE_HOOKS: Mapping[str, Hook | None] = {
    "RoPE": rotate_at_tree_positions,
    "Llama3RoPE": rotate_at_tree_positions,
    "YarnRoPE": rotate_at_tree_positions,
    "SuScaledRoPE": rotate_at_tree_positions,
    "ProportionalRoPE": rotate_at_tree_positions,
    "DynamicNTKAlphaRoPE": rotate_at_tree_positions,
    "DeepseekV2YarnRotaryEmbedding": rotate_at_tree_positions,
    "DynamicNTKScalingRoPE": rotate_with_dynamic_base,
    "NoPE": None,
}

# Keys of the number of positions a model was made for, in the configs of different families.
CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "block_size")


@dataclass(frozen=True)
class Architecture:
    """Facts about one model file of mlx-lm.

    Attributes:
        ropes: Kinds of rope scaling that decode exactly.
        hidden: Path of the module whose output enters the LM head.
        embedding: Path of the input embedding.
        methods: Hooks for methods other than a rope's, by module name and method name.
        functions: Hooks for functions of the model file.
    """

    ropes: tuple[str, ...] = ALL_ROPES
    hidden: str = "model"
    embedding: str = "model.embed_tokens"
    methods: Mapping[tuple[str, str], Hook] = field(default_factory=dict)
    functions: Mapping[str, Hook] = field(default_factory=dict)


PLAIN = Architecture()
LLAMA_4_SCALE = {"_get_llama_4_attn_scale": scale_at_tree_positions}
LEARNED_POSITIONS = {("wpe", "__call__"): embed_tree_positions}
DELTA_RULE = {"gated_delta_update": update_delta_rule}
SHORT_CONVOLUTION = {("conv", "__call__"): convolve_short}
PAIRS = {
    ("self_attn", "__call__"): follow_branches,
    ("self_attn", "_custom_convolution"): convolve_pairs,
}
STATE_SPACE = {"ssm_update": update_state_space}


def recurrent(layer: str, *convolutions: str) -> Mapping[tuple[str, str], Hook]:
    """Hooks of a layer with a state and of its convolutions, by their names."""
    hooks = {(name, "__call__"): convolve_branches for name in convolutions or ("conv1d",)}
    return {(layer, "__call__"): follow_branches, **hooks}


ARCHITECTURES: Mapping[str, Architecture] = {
    "Klear": PLAIN,
    "afm7": Architecture(embedding="model.embedding"),
    "afmoe": PLAIN,
    "apertus": PLAIN,
    "baichuan_m1": Architecture(methods=PAIRS),
    "bailing_moe": Architecture(embedding="model.word_embeddings"),
    "bailing_moe_v3": Architecture(
        embedding="model.word_embeddings", methods={("attention", "__call__"): follow_levels}
    ),
    "cohere": PLAIN,
    "cohere2": PLAIN,
    "dbrx": Architecture(hidden="transformer", embedding="transformer.wte"),
    "deepseek": PLAIN,
    "deepseek_v2": Architecture(ropes=YARN),
    "deepseek_v3": PLAIN,
    "dots1": PLAIN,
    "ernie4_5": PLAIN,
    "ernie4_5_moe": PLAIN,
    "exaone": Architecture(hidden="transformer", embedding="transformer.wte"),
    "exaone4": PLAIN,
    "exaone_moe": PLAIN,
    "falcon_h1": Architecture(methods=recurrent("mamba"), functions=STATE_SPACE),
    "gear": Architecture(methods=recurrent("local_mixer", "key_conv", "value_conv")),
    "gemma": PLAIN,
    "gemma2": Architecture(methods={("self_attn", "__call__"): mask_groups}),
    "gemma3_text": PLAIN,
    "gemma3n": Architecture(
        hidden="model.language_model.norm", embedding="model.language_model.embed_tokens"
    ),
    "gemma4_text": PLAIN,
    "glm": PLAIN,
    "glm4": PLAIN,
    "glm4_moe": PLAIN,
    "glm4_moe_lite": PLAIN,
    "gpt2": Architecture(embedding="model.wte", methods=LEARNED_POSITIONS),
    "gpt_bigcode": Architecture(
        hidden="transformer", embedding="transformer.wte", methods=LEARNED_POSITIONS
    ),
    "gpt_neox": Architecture(hidden="model.final_layer_norm", embedding="model.embed_in"),
    "gpt_oss": Architecture(ropes=(*LINEAR, "llama3", *YARN, "proportional", "mrope")),
    "gptj": Architecture(embedding="model.wte"),
    "granite": PLAIN,
    "granitemoe": PLAIN,
    "granitemoehybrid": Architecture(methods=recurrent("mamba"), functions=STATE_SPACE),
    "helium": PLAIN,
    "hunyuan": Architecture(ropes=("dynamic",)),
    "hunyuan_v1_dense": Architecture(ropes=("default", "dynamic")),
    "internlm2": Architecture(ropes=(*LINEAR, "dynamic"), embedding="model.tok_embeddings"),
    "internlm3": Architecture(ropes=(*LINEAR, "dynamic")),
    "iquestloopcoder": PLAIN,
    "jamba": Architecture(methods={("mamba", "__call__"): follow_levels}),
    "kimi_linear": Architecture(methods={("self_attn", "__call__"): follow_levels}),
    "laguna": PLAIN,
    "lfm2": Architecture(methods=SHORT_CONVOLUTION),
    "lfm2_moe": Architecture(methods=SHORT_CONVOLUTION),
    "lille-130m": Architecture(hidden="transformer.norm", embedding="transformer.tok_embeddings"),
    "llama": PLAIN,
    "llama4": Architecture(methods={("self_attn", "__call__"): attend_in_chunks}),
    "llama4_text": PLAIN,
    "longcat_flash": PLAIN,
    "mamba": Architecture(
        hidden="backbone",
        embedding="backbone.embeddings",
        methods={("mixer", "__call__"): follow_levels},
    ),
    "mamba2": Architecture(
        hidden="backbone",
        embedding="backbone.embeddings",
        methods=recurrent("mixer"),
        functions=STATE_SPACE,
    ),
    "mellum": PLAIN,
    "mimo": PLAIN,
    "mimo_v2_flash": PLAIN,
    "minicpm": PLAIN,
    "minicpm3": Architecture(ropes=("longrope",)),
    "minimax": PLAIN,
    "ministral3": Architecture(functions=LLAMA_4_SCALE),
    "mistral4": Architecture(functions=LLAMA_4_SCALE),
    "mixtral": PLAIN,
    "muse_glimmer": PLAIN,
    "nanbeige": PLAIN,
    "nanochat": Architecture(
        hidden="transformer",
        embedding="transformer.wte",
        functions={"apply_rotary_emb": rotate_at_tree_positions},
    ),
    "nemotron": Architecture(ropes=LINEAR),
    "nemotron-nas": PLAIN,
    "nemotron_h": Architecture(
        hidden="backbone",
        embedding="backbone.embeddings",
        methods=recurrent("mixer"),
        functions=STATE_SPACE,
    ),
    "olmo2": PLAIN,
    "olmo3": PLAIN,
    "olmo_hybrid": Architecture(
        methods=recurrent("linear_attn", "q_conv1d", "k_conv1d", "v_conv1d"), functions=DELTA_RULE
    ),
    "olmoe": PLAIN,
    "openelm": Architecture(hidden="transformer", embedding="transformer.token_embeddings"),
    "phi": PLAIN,
    "phi3": Architecture(ropes=(*LINEAR, "longrope", "su")),
    "phimoe": Architecture(ropes=("default", "longrope")),
    "phixtral": Architecture(hidden="lm_head.ln", embedding="transformer.embd.wte"),
    "plamo": PLAIN,
    "plamo2": Architecture(methods=recurrent("mixer"), functions=STATE_SPACE),
    "plamo3": PLAIN,
    "qwen": Architecture(hidden="transformer", embedding="transformer.wte"),
    "qwen2": PLAIN,
    "qwen2_moe": Architecture(ropes=LINEAR),
    "qwen3": PLAIN,
    "qwen3_5": Architecture(methods=recurrent("linear_attn"), functions=DELTA_RULE),
    "qwen3_moe": PLAIN,
    "qwen3_next": Architecture(methods=recurrent("linear_attn"), functions=DELTA_RULE),
    "recurrent_gemma": Architecture(methods={("temporal_block", "__call__"): follow_levels}),
    "seed_oss": PLAIN,
    "smollm3": PLAIN,
    "solar_open": PLAIN,
    "spark2_5": Architecture(embedding="model.embedding"),
    "stablelm": PLAIN,
    "starcoder2": PLAIN,
    "step3p5": PLAIN,
    "talkie": Architecture(
        embedding="model.embed", methods={("attn", "_rope"): rotate_at_tree_positions}
    ),
    "telechat3": PLAIN,
    "youtu_llm": PLAIN,
}

# Models with a vision tower that mlx-lm leaves out, by the language models inside them; of
# several, the text config's ``model_type`` chooses, and the first is what others stand for.
WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "kimi_k25": ("deepseek_v3",),
    "kimi_vl": ("deepseek_v3",),
    "lfm2-vl": ("lfm2",),
    "llama4": ("llama4",),
    "mistral3": ("llama", "ministral3", "mistral4"),
    "pixtral": ("llama",),
    "prism_hadamard_qwen35": ("qwen3_5",),
    "qwen2_vl": ("qwen2",),
    "qwen3_5": ("qwen3_5",),
    "qwen3_5_moe": ("qwen3_5",),
    "qwen3_vl": ("qwen3",),
    "qwen3_vl_moe": ("qwen3_moe",),
}

SUPPORTED: Mapping[str, tuple[str, ...]] = dict(
    sorted(
        [(name, architecture.ropes) for name, architecture in ARCHITECTURES.items()]
        + [(name, ARCHITECTURES[texts[0]].ropes) for name, texts in WRAPPERS.items()]
    )
)
"""Kinds of rope scaling by model type: what `check_config` lets pass."""

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("bailing_hybrid", "bailing_moe_linear"),
        "its linear attention rotates the tokens of a pass as if each followed the one before it",
    ),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v41", "glm_moe_dsa", "minimax_m3_vl"),
        "layers that pick the tokens they attend to keep a second cache, which cannot hold a tree",
    ),
    "kimi_k3": "its residuals across layers were never compared with token-by-token decoding",
    "longcat_flash_ngram": "its embedding of the tokens before goes by their order in a pass",
    "rwkv7": "its layers take rows from the first one, which do not follow the branches of a tree",
    **dict.fromkeys(
        ("bitnet", "muse_spark"),
        "its kernels run on Metal only and were never compared with token-by-token decoding",
    ),
    "olmo": "mlx-lm needs the package ai2-olmo for it, without which it ends the program",
    "phi3small": "its block-sparse attention goes by the order of the tokens in a forward pass",
}
"""Why model types of mlx-lm are not supported."""
