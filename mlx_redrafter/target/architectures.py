"""Tables of mlx-lm's models: the paths of their parts, and why some are not supported.

Support is an allow-list: tests compare the trees of every model type and kind of rope scaling here
with plain decoding. For other types the error gives the reason. Model types are mlx-lm's file
names. A ``config.json`` may use several names for one of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from mlx_redrafter.target.recurrent_hooks import (
    convolve_branches,
    convolve_pairs,
    convolve_short,
    follow_branches,
    follow_depths,
    update_delta_rule,
    update_state_space,
)

Config = Mapping[str, Any]

# Names of linear rope scaling and of none in configs, under ``type`` or ``rope_type``.
LINEAR = ("default", "linear")
# Names of yarn in configs.
YARN = ("yarn", "deepseek_yarn", "telechat3-yarn")
# Rope scaling of mlx-lm's `initialize_rope`. Model files that ignore rope scaling accept all kinds.
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

# Keys of the number of positions for which a model was made, in the configs of different families.
CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "block_size")


@dataclass(frozen=True)
class Architecture:
    """Facts about one model file of mlx-lm."""

    ropes: tuple[str, ...] = ALL_ROPES  # supported kinds of rope scaling
    hidden: str = "model"  # path of the module whose output enters the LM head
    embedding: str = "model.embed_tokens"  # path of the input embedding
    # Hooks for methods other than a rope's, by module name and method name.
    methods: Mapping[tuple[str, str], Hook] = field(default_factory=dict)
    functions: Mapping[str, Hook] = field(default_factory=dict)  # hooks for those of the model file


# Paths of model files that name their parts as GPT-2 does.
TRANSFORMER = Architecture(hidden="transformer", embedding="transformer.wte")
# Paths of model files that name them as Mamba does.
BACKBONE = Architecture(hidden="backbone", embedding="backbone.embeddings")
# Hook for the attention scale of Llama 4.
LLAMA_4_SCALE = {"_get_llama_4_attn_scale": scale_at_tree_positions}
# Hook for learned position embeddings.
LEARNED_POSITIONS = {("wpe", "__call__"): embed_tree_positions}
# Hook for the gated delta rule.
DELTA_RULE = {"gated_delta_update": update_delta_rule}
# Hook for the short convolution of LFM2.
SHORT_CONVOLUTION = {("conv", "__call__"): convolve_short}
# Hook for the recurrence of Mamba-2.
STATE_SPACE = {"ssm_update": update_state_space}
# Model files with the default paths and all kinds of rope scaling, without hooks of their own.
PLAIN = """
    Klear afmoe apertus cohere cohere2 deepseek deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4
    exaone_moe gemma gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite granite granitemoe
    helium iquestloopcoder laguna llama llama4_text longcat_flash mellum mimo mimo_v2_flash minicpm
    minimax mixtral muse_glimmer nanbeige nemotron-nas olmo2 olmo3 olmoe phi plamo plamo3 qwen2
    qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 step3p5 telechat3 youtu_llm
""".split()


def recurrent(layer: str, *convolutions: str) -> Mapping[tuple[str, str], Hook]:
    """Make the hooks of a layer with a state and of its convolutions, by their names."""
    hooks = {(name, "__call__"): convolve_branches for name in convolutions or ("conv1d",)}
    return {(layer, "__call__"): follow_branches, **hooks}


# Supported model files.
ARCHITECTURES: Mapping[str, Architecture] = {
    **dict.fromkeys(PLAIN, Architecture()),
    "afm7": Architecture(embedding="model.embedding"),
    "baichuan_m1": Architecture(
        methods={
            ("self_attn", "__call__"): follow_branches,
            ("self_attn", "_custom_convolution"): convolve_pairs,
        }
    ),
    "bailing_moe": Architecture(embedding="model.word_embeddings"),
    "bailing_moe_v3": Architecture(
        embedding="model.word_embeddings", methods={("attention", "__call__"): follow_depths}
    ),
    "dbrx": TRANSFORMER,
    "deepseek_v2": Architecture(ropes=YARN),
    "exaone": TRANSFORMER,
    "falcon_h1": Architecture(methods=recurrent("mamba"), functions=STATE_SPACE),
    "gear": Architecture(methods=recurrent("local_mixer", "key_conv", "value_conv")),
    "gemma2": Architecture(methods={("self_attn", "__call__"): mask_groups}),
    "gemma3n": Architecture(
        hidden="model.language_model.norm", embedding="model.language_model.embed_tokens"
    ),
    "gpt2": Architecture(embedding="model.wte", methods=LEARNED_POSITIONS),
    "gpt_bigcode": replace(TRANSFORMER, methods=LEARNED_POSITIONS),
    "gpt_neox": Architecture(hidden="model.final_layer_norm", embedding="model.embed_in"),
    "gpt_oss": Architecture(ropes=(*LINEAR, "llama3", *YARN, "proportional", "mrope")),
    "gptj": Architecture(embedding="model.wte"),
    "granitemoehybrid": Architecture(methods=recurrent("mamba"), functions=STATE_SPACE),
    "hunyuan": Architecture(ropes=("dynamic",)),
    "hunyuan_v1_dense": Architecture(ropes=("default", "dynamic")),
    "internlm2": Architecture(ropes=(*LINEAR, "dynamic"), embedding="model.tok_embeddings"),
    "internlm3": Architecture(ropes=(*LINEAR, "dynamic")),
    "jamba": Architecture(methods={("mamba", "__call__"): follow_depths}),
    "kimi_linear": Architecture(methods={("self_attn", "__call__"): follow_depths}),
    "lfm2": Architecture(methods=SHORT_CONVOLUTION),
    "lfm2_moe": Architecture(methods=SHORT_CONVOLUTION),
    "lille-130m": Architecture(hidden="transformer.norm", embedding="transformer.tok_embeddings"),
    "llama4": Architecture(methods={("self_attn", "__call__"): attend_in_chunks}),
    "mamba": replace(BACKBONE, methods={("mixer", "__call__"): follow_depths}),
    "mamba2": replace(BACKBONE, methods=recurrent("mixer"), functions=STATE_SPACE),
    "minicpm3": Architecture(ropes=("longrope",)),
    "ministral3": Architecture(functions=LLAMA_4_SCALE),
    "mistral4": Architecture(functions=LLAMA_4_SCALE),
    "nanochat": replace(TRANSFORMER, functions={"apply_rotary_emb": rotate_at_tree_positions}),
    "nemotron": Architecture(ropes=LINEAR),
    "nemotron_h": replace(BACKBONE, methods=recurrent("mixer"), functions=STATE_SPACE),
    "olmo_hybrid": Architecture(
        methods=recurrent("linear_attn", "q_conv1d", "k_conv1d", "v_conv1d"), functions=DELTA_RULE
    ),
    "openelm": Architecture(hidden="transformer", embedding="transformer.token_embeddings"),
    "phi3": Architecture(ropes=(*LINEAR, "longrope", "su")),
    "phimoe": Architecture(ropes=("default", "longrope")),
    "phixtral": Architecture(hidden="lm_head.ln", embedding="transformer.embd.wte"),
    "plamo2": Architecture(methods=recurrent("mixer"), functions=STATE_SPACE),
    "qwen": TRANSFORMER,
    "qwen2_moe": Architecture(ropes=LINEAR),
    "qwen3_5": Architecture(methods=recurrent("linear_attn"), functions=DELTA_RULE),
    "qwen3_next": Architecture(methods=recurrent("linear_attn"), functions=DELTA_RULE),
    "recurrent_gemma": Architecture(methods={("temporal_block", "__call__"): follow_depths}),
    "spark2_5": Architecture(embedding="model.embedding"),
    "talkie": Architecture(
        embedding="model.embed", methods={("attn", "_rope"): rotate_at_tree_positions}
    ),
}

# Language models inside models with a vision tower, which mlx-lm leaves out. The ``model_type`` of
# the text config selects one; unknown types select the first.
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

# Supported kinds of rope scaling, by model type.
SUPPORTED: Mapping[str, tuple[str, ...]] = {
    name: ARCHITECTURES[WRAPPERS.get(name, (name,))[0]].ropes
    for name in sorted(ARCHITECTURES.keys() | WRAPPERS.keys())
}

# Reasons why other model types of mlx-lm are not supported.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("bailing_hybrid", "bailing_moe_linear"),
        "its linear attention rotates the tokens of a pass as if each followed the previous one",
    ),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v41", "glm_moe_dsa", "minimax_m3_vl"),
        "layers that pick the tokens they attend to keep a second cache, which cannot hold a tree",
    ),
    "kimi_k3": "its residuals across layers were never compared with token-by-token decoding",
    "longcat_flash_ngram": "its embedding of previous tokens depends on their order in a pass",
    "rwkv7": "its layers read rows of the first layer, which do not follow the branches of a tree",
    **dict.fromkeys(
        ("bitnet", "muse_spark"),
        "its kernels run on Metal only and were never compared with token-by-token decoding",
    ),
    "olmo": "mlx-lm needs the package ai2-olmo for it, without which it ends the program",
    "phi3small": "its block-sparse attention depends on the order of the tokens in a pass",
}
