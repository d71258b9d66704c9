"""Which mlx-lm models are decoded exactly, and where their parts are.

Support is an allow-list: a model type with a kind of rope scaling is here when the parity tests
compare its trees with token-by-token decoding. The rest is refused by name and reason. Model types
are mlx-lm's file names, which several names in a ``config.json`` may stand for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING

from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.target.hooks import (
    Hook,
    HookPoint,
    capture,
    embed_tree_positions,
    rotate_at_tree_positions,
    rotate_with_dynamic_base,
    scale_at_tree_positions,
)

Config = Mapping[str, Any]

# Kinds of rope scaling, as ``type`` or ``rope_type`` names them in a config.
UNSCALED = ("default",)
LINEAR = (*UNSCALED, "linear")
YARN = ("yarn", "deepseek_yarn", "telechat3-yarn")
# What mlx-lm's `initialize_rope` knows; model files that read no rope scaling take all of it too.
ALL_ROPES = (*LINEAR, "dynamic", "llama3", *YARN, "longrope", "proportional", "mrope")

# Every class of rotary embedding that positions are known for; None has no positions.
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

# Where configs of different families say how many positions a model was made for.
CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "block_size")

MLX_LM_MODELS = "mlx_lm.models."


def _never(config: Config) -> bool:
    return False


def _has_windowed_layers(config: Config) -> bool:
    return any(kind != "full_attention" for kind in config.get("layer_types") or ())


def _has_window_pattern(config: Config) -> bool:
    return bool(config.get("sliding_window_pattern"))


@dataclass(frozen=True)
class Architecture:
    """What there is to know about one model file of mlx-lm.

    Attributes:
        ropes: Kinds of rope scaling that decode exactly.
        hidden: Path of the module whose output enters the LM head.
        embedding: Path of the input embedding.
        methods: Hooks for methods other than a rope's, by module name and method name.
        functions: Hooks for functions of the model file.
        has_windows: Whether layers attend to a window only, which some configs ask for.
    """

    ropes: tuple[str, ...] = ALL_ROPES
    hidden: str = "model"
    embedding: str = "model.embed_tokens"
    methods: Mapping[tuple[str, str], Hook] = field(default_factory=dict)
    functions: Mapping[str, Hook] = field(default_factory=dict)
    has_windows: Callable[[Config], bool] = _never


PLAIN = Architecture()
LLAMA_4_SCALE = {"_get_llama_4_attn_scale": scale_at_tree_positions}
LEARNED_POSITIONS = {("wpe", "__call__"): embed_tree_positions}

ARCHITECTURES: Mapping[str, Architecture] = {
    "Klear": PLAIN,
    "afm7": Architecture(embedding="model.embedding"),
    "apertus": PLAIN,
    "bailing_moe": Architecture(embedding="model.word_embeddings"),
    "cohere": PLAIN,
    "dbrx": Architecture(hidden="transformer", embedding="transformer.wte"),
    "deepseek": PLAIN,
    "deepseek_v2": Architecture(ropes=YARN),
    "deepseek_v3": PLAIN,
    "dots1": PLAIN,
    "ernie4_5": PLAIN,
    "ernie4_5_moe": PLAIN,
    "exaone": Architecture(hidden="transformer", embedding="transformer.wte"),
    "exaone4": Architecture(has_windows=_has_window_pattern),
    "gemma": PLAIN,
    "gemma2": PLAIN,
    "glm": PLAIN,
    "glm4": PLAIN,
    "glm4_moe": PLAIN,
    "glm4_moe_lite": PLAIN,
    "gpt2": Architecture(embedding="model.wte", methods=LEARNED_POSITIONS),
    "gpt_bigcode": Architecture(
        hidden="transformer", embedding="transformer.wte", methods=LEARNED_POSITIONS
    ),
    "gpt_neox": Architecture(hidden="model.final_layer_norm", embedding="model.embed_in"),
    "gptj": Architecture(embedding="model.wte"),
    "granite": PLAIN,
    "granitemoe": PLAIN,
    "helium": PLAIN,
    "hunyuan": Architecture(ropes=("dynamic",)),
    "hunyuan_v1_dense": Architecture(ropes=("default", "dynamic")),
    "internlm2": Architecture(ropes=(*LINEAR, "dynamic"), embedding="model.tok_embeddings"),
    "internlm3": Architecture(ropes=(*LINEAR, "dynamic")),
    "lille-130m": Architecture(hidden="transformer.norm", embedding="transformer.tok_embeddings"),
    "llama": Architecture(has_windows=_has_windowed_layers),
    "llama4_text": PLAIN,
    "mimo": PLAIN,
    "minicpm": PLAIN,
    "minicpm3": Architecture(ropes=("longrope",)),
    "minimax": PLAIN,
    "ministral3": Architecture(functions=LLAMA_4_SCALE, has_windows=_has_windowed_layers),
    "mistral4": Architecture(functions=LLAMA_4_SCALE),
    "mixtral": PLAIN,
    "nanbeige": PLAIN,
    "nanochat": Architecture(
        hidden="transformer",
        embedding="transformer.wte",
        functions={"apply_rotary_emb": rotate_at_tree_positions},
    ),
    "nemotron": Architecture(ropes=LINEAR),
    "nemotron-nas": PLAIN,
    "olmo2": PLAIN,
    "olmoe": PLAIN,
    "openelm": Architecture(hidden="transformer", embedding="transformer.token_embeddings"),
    "phi": PLAIN,
    "phi3": Architecture(ropes=(*LINEAR, "longrope", "su")),
    "phimoe": Architecture(ropes=("default", "longrope")),
    "phixtral": Architecture(hidden="lm_head.ln", embedding="transformer.embd.wte"),
    "plamo": PLAIN,
    "qwen": Architecture(hidden="transformer", embedding="transformer.wte"),
    "qwen2": PLAIN,
    "qwen2_moe": Architecture(ropes=LINEAR),
    "qwen3": PLAIN,
    "qwen3_moe": PLAIN,
    "seed_oss": PLAIN,
    "smollm3": Architecture(has_windows=_has_windowed_layers),
    "solar_open": PLAIN,
    "stablelm": PLAIN,
    "starcoder2": PLAIN,
    "talkie": Architecture(
        embedding="model.embed", methods={("attn", "_rope"): rotate_at_tree_positions}
    ),
    "telechat3": PLAIN,
    "youtu_llm": PLAIN,
}

# Models with a vision tower that mlx-lm leaves out, by the language models inside them; of
# several, the text config's ``model_type`` chooses, and the first is what others stand for.
WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "kimi_k25": ("deepseek_v3",),
    "kimi_vl": ("deepseek_v3",),
    "mistral3": ("llama", "ministral3", "mistral4"),
    "pixtral": ("llama",),
    "qwen2_vl": ("qwen2",),
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

WINDOW = "layers with a sliding or chunked window forget tokens that a tree may still need"
RECURRENT = "layers with a recurrent or convolutional state cannot follow several branches"
SPARSE = "layers that pick the tokens they attend to keep a second cache, which cannot hold a tree"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "afmoe",
            "cohere2",
            "exaone_moe",
            "gemma3",
            "gemma3_text",
            "gemma3n",
            "gemma4",
            "gemma4_text",
            "gpt_oss",
            "iquestloopcoder",
            "laguna",
            "llama4",
            "mellum",
            "mimo_v2_flash",
            "muse_glimmer",
            "muse_spark",
            "olmo3",
            "plamo3",
            "spark2_5",
            "step3p5",
        ),
        WINDOW,
    ),
    **dict.fromkeys(
        (
            "baichuan_m1",
            "bailing_hybrid",
            "bailing_moe_linear",
            "bailing_moe_v3",
            "falcon_h1",
            "gear",
            "granitemoehybrid",
            "jamba",
            "kimi_k3",
            "kimi_linear",
            "lfm2",
            "lfm2-vl",
            "lfm2_moe",
            "mamba",
            "mamba2",
            "nemotron_h",
            "olmo_hybrid",
            "plamo2",
            "prism_hadamard_qwen35",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_next",
            "recurrent_gemma",
            "rwkv7",
        ),
        RECURRENT,
    ),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v41", "glm_moe_dsa", "minimax_m3_vl"),
        SPARSE,
    ),
    **dict.fromkeys(
        ("longcat_flash", "longcat_flash_ngram"),
        "layers with two attention blocks keep two caches, which cannot hold a tree",
    ),
    "bitnet": "its kernels run on Metal only and were never compared with token-by-token decoding",
    "olmo": "mlx-lm needs the package ai2-olmo for it, without which it ends the program",
    "phi3small": "its block-sparse attention goes by the order of the tokens in a forward pass",
}
"""Why model types of mlx-lm are not supported."""


class Parts(NamedTuple):
    """The parts of a model that this package needs.

    Attributes:
        hooks: What to hook for the output that enters the LM head to be seen, and for nodes of a
            tree to get their positions.
        embedding: The input embedding, ids to rows.
        hidden_size: H.
        vocab_size: Rows of the embedding.
        context_length: Positions the model was made for, None where the config does not say.
    """

    hooks: list[HookPoint]
    embedding: nn.Module
    hidden_size: int
    vocab_size: int
    context_length: int | None


def supported_names() -> list[str]:
    """What ``model_type`` of a ``config.json`` may be, the names that mlx-lm maps included."""
    aliases = [alias for alias, name in MODEL_REMAPPING.items() if name in SUPPORTED]
    return sorted({*SUPPORTED, *aliases}, key=str.lower)


def check_config(config: Config) -> None:
    """Check by its ``config.json`` alone that a model can be decoded exactly.

    Raises:
        UnsupportedTargetError: It cannot; the message says why.
    """
    name = config.get("model_type")
    if not isinstance(name, str):
        raise _refusal("a config.json without model_type", "what it describes is not known")
    if config.get("model_file") is not None:
        raise _refusal(f"model_type {name!r} with code of its own", "that code is not known here")
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "bitnet":
        raise _refusal("bitnet quantization", REFUSED["bitnet"])
    _check_text_config(name, *_find_text_config(MODEL_REMAPPING.get(name, name), config))


def find_parts(model: nn.Module) -> Parts:
    """Find the parts of a supported model, and check on the model itself that it is one.

    Raises:
        UnsupportedTargetError: The architecture is not known to be decoded exactly.
    """
    name = _file_name(model)
    text_model, text_name = model, name
    if name in WRAPPERS:
        text_model = model.language_model
        inner = _file_name(text_model)
        text_name = inner if inner in WRAPPERS[name] else WRAPPERS[name][0]
    args = _find_args(text_model)
    _check_text_config(name, text_name, args)
    _check_caches(name, model)

    architecture = ARCHITECTURES[text_name]
    hidden = _find_module(text_model, architecture.hidden)
    embedding = _find_module(text_model, architecture.embedding)
    table = getattr(embedding, "embedding", embedding)  # inside a LoRA layer
    positions = list(_find_position_hooks(name, text_name, text_model))
    if not positions:
        raise _refusal(f"model_type {name!r} without positions", "its tokens cannot be placed")
    return Parts(
        hooks=[HookPoint(hidden, "__call__", capture), *positions],
        embedding=embedding,
        hidden_size=getattr(table, "dims", table.weight.shape[-1]),  # quantised weights are packed
        vocab_size=table.weight.shape[0],
        context_length=next((args[key] for key in CONTEXT_LENGTH_KEYS if args.get(key)), None),
    )


def _find_text_config(name: str, config: Config) -> tuple[str, Config]:
    """The model type and config of the language model."""
    if name not in WRAPPERS:
        return name, config
    text_config = config.get("text_config")
    if not isinstance(text_config, Mapping):
        text_config = config
    text_name = text_config.get("model_type")
    return text_name if text_name in WRAPPERS[name] else WRAPPERS[name][0], text_config


def _check_text_config(name: str, text_name: str, config: Config) -> None:
    architecture = ARCHITECTURES.get(text_name)
    if architecture is None:
        unknown = "nobody compared its trees with token-by-token decoding yet"
        raise _refusal(f"model_type {name!r}", REFUSED.get(text_name, unknown))
    if architecture.has_windows(config):
        raise _refusal(f"model_type {name!r} with a sliding window", WINDOW)
    for kind in _rope_kinds(config):
        if kind not in architecture.ropes:
            raise _refusal(
                f"model_type {name!r} with rope scaling {kind!r}",
                f"its trees were compared with token-by-token decoding for "
                f"{', '.join(architecture.ropes)} only",
            )


def _rope_kinds(config: Config) -> set[str]:
    scalings = [config.get(key) for key in ("rope_scaling", "rope_parameters")]
    kinds = {
        str(scaling.get("type") or scaling.get("rope_type", "default"))
        for scaling in scalings
        if isinstance(scaling, Mapping)
    }
    return kinds or {"default"}


def _check_caches(name: str, model: nn.Module) -> None:
    kinds = {type(cache).__name__ for cache in make_prompt_cache(model)}
    if kinds != {KVCache.__name__}:
        raise _refusal(
            f"model_type {name!r} with caches {', '.join(sorted(kinds))}",
            "a tree fits into the plain KVCache only",
        )


def _find_position_hooks(name: str, text_name: str, model: nn.Module) -> Iterator[HookPoint]:
    architecture = ARCHITECTURES[text_name]
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if "rope" in leaf or "rotary" in leaf:
            yield from _find_rope_hook(name, module)
        for (owner, method), hook in architecture.methods.items():
            if leaf == owner:
                yield HookPoint(module, method, hook)
    for function, hook in architecture.functions.items():
        yield HookPoint(sys.modules[MLX_LM_MODELS + text_name], function, hook)


def _find_rope_hook(name: str, rope: nn.Module) -> Iterator[HookPoint]:
    kind = type(rope).__name__
    if kind not in ROPE_HOOKS:
        raise _refusal(f"model_type {name!r} with a {kind}", "its positions are not known here")
    hook = ROPE_HOOKS[kind]
    if hook is not None:
        yield HookPoint(rope, "__call__", hook)


def _find_args(model: nn.Module) -> Config:
    """What mlx-lm read from the config; model files keep it under two names."""
    return vars(getattr(model, "args", None) or model.config)


def _find_module(model: nn.Module, path: str) -> Any:
    for name in path.split("."):
        model = getattr(model, name)
    return model


def _file_name(model: nn.Module) -> str:
    """The model file of mlx-lm that defines this class."""
    module = type(model).__module__
    if not module.startswith(MLX_LM_MODELS):
        raise _refusal(f"a model class from {module}", "that code is not known here")
    return module.removeprefix(MLX_LM_MODELS)


def _refusal(found: str, reason: str) -> UnsupportedTargetError:
    return UnsupportedTargetError(
        f"{found} cannot be decoded exactly: {reason}; use mlx_lm.generate for this model"
    )
