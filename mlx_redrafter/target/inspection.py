"""Finding the parts of an mlx-lm model, and refusing what cannot be decoded exactly.

`check_config` looks at a config alone, before weights are read; `find_parts` at the model itself.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING

from mlx_redrafter.errors import CheckpointError, UnsupportedTargetError
from mlx_redrafter.target.architectures import (
    ARCHITECTURES,
    CONTEXT_LENGTH_KEYS,
    REFUSED,
    ROPE_HOOKS,
    SUPPORTED,
    WRAPPERS,
    Config,
)
from mlx_redrafter.target.caches.cache_kinds import LAYER_CACHES, describe, holds_trees
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.hooks import Hook, HookPoint, capture, install

MLX_LM_MODELS = "mlx_lm.models."
# Bounds on what a config file may claim, far above any model.
MAX_SIZE, MAX_LAYERS = 2**24, 2**12
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SIZE_KEYS = ("vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head", "head_dim")
ROPE_KEYS = ("rope_scaling", "rope_parameters")


class Parts(NamedTuple):
    """The parts of a model that this package needs.

    Attributes:
        hooks: Places to hook, for the output that enters the LM head and for the positions of the
            nodes of a tree.
        embedding: The input embedding, ids to rows.
        num_layers: Number of caches.
        hidden_size: H.
        vocab_size: Rows of the embedding.
        context_length: Positions the model was made for, None where the config does not say or no
            layer counts them.
    """

    hooks: list[HookPoint]
    embedding: nn.Module
    num_layers: int
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
        CheckpointError: A value cannot be any model's.
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
    text_name, text_config = _find_text_config(MODEL_REMAPPING.get(name, name), config)
    _check_values(text_config)
    _check_text_config(name, text_name, text_config)


def _check_values(config: Config) -> None:
    """Check what a model would be built from, which may take any time and memory."""
    for key, value in config.items():
        if value is None:
            continue
        expected = None
        if key in ROPE_KEYS and not isinstance(value, Mapping):
            expected = "an object or null"
        elif key == "layer_types" and not isinstance(value, list):
            expected = "a list or null"
        elif key in (*LAYER_KEYS, *SIZE_KEYS, *CONTEXT_LENGTH_KEYS):
            most = MAX_LAYERS if key in LAYER_KEYS else MAX_SIZE
            if type(value) is not int or not 1 <= value <= most:
                expected = f"an integer from 1 to {most}"
        if expected is not None:
            found = reprlib.repr(value)
            raise CheckpointError(
                f"config.json says {key} {found}, expected {expected}; download the model again"
            )


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
    caches = make_prompt_cache(model)
    _check_caches(name, caches)

    architecture = ARCHITECTURES[text_name]
    hidden = _find_module(text_model, architecture.hidden)
    embedding = _find_module(text_model, architecture.embedding)
    table = getattr(embedding, "embedding", embedding)  # inside a LoRA layer
    positions = list(_find_position_hooks(name, text_name, text_model))
    if not positions:
        raise _refusal(f"model_type {name!r} without positions", "its tokens cannot be placed")
    lengths = () if num_tokens(caches) is None else map(args.get, CONTEXT_LENGTH_KEYS)
    return Parts(
        hooks=[HookPoint(hidden, "__call__", capture), *positions],
        embedding=embedding,
        num_layers=len(caches),
        hidden_size=getattr(table, "dims", table.weight.shape[-1]),  # quantised weights are packed
        vocab_size=table.weight.shape[0],
        context_length=next(filter(None, lengths), None),
    )


def hook_positions(network: nn.Module) -> None:
    """Let rotary embeddings of mlx-lm in a network rotate nodes of a tree by their own positions.

    Raises:
        UnsupportedTargetError: There is one of an unknown kind.
    """
    for leaf, module in _named_modules(network):
        if "rope" in leaf or "rotary" in leaf:
            for point in _find_rope_hook(type(network).__name__, module):
                install(point)


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
        unknown = "not verified to decode exactly yet"
        raise _refusal(f"model_type {name!r}", REFUSED.get(text_name, unknown))
    for kind in _rope_kinds(config):
        if kind not in architecture.ropes:
            raise _refusal(
                f"model_type {name!r} with rope scaling {kind!r}",
                f"verified with rope scaling {', '.join(architecture.ropes)} only",
            )


def _rope_kinds(config: Config) -> set[str]:
    scalings = [config.get(key) for key in ROPE_KEYS]
    # Some families have one for each type of layer.
    scalings += [
        inner for scaling in scalings if isinstance(scaling, Mapping) for inner in scaling.values()
    ]
    kinds = {
        str(scaling.get("type") or scaling.get("rope_type", "default"))
        for scaling in scalings
        if isinstance(scaling, Mapping)
    }
    return kinds or {"default"}


def _check_caches(name: str, caches: list[Any]) -> None:
    others = {describe(cache) for cache in caches if not holds_trees(cache)}
    if others:
        raise _refusal(
            f"model_type {name!r} with caches {', '.join(sorted(others))}",
            f"a tree fits into {', '.join(kind.__name__ for kind in LAYER_CACHES)} only",
        )


def _find_position_hooks(name: str, text_name: str, model: nn.Module) -> Iterator[HookPoint]:
    architecture = ARCHITECTURES[text_name]
    methods: dict[str, list[tuple[str, Hook]]] = {}
    for (owner, method), hook in architecture.methods.items():
        methods.setdefault(owner, []).append((method, hook))
    for leaf, module in _named_modules(model):
        if "rope" in leaf or "rotary" in leaf:
            yield from _find_rope_hook(name, module)
        for method, hook in methods.get(leaf, ()):
            yield HookPoint(module, method, hook)
    for function, hook in architecture.functions.items():
        yield HookPoint(sys.modules[MLX_LM_MODELS + text_name], function, hook)


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules below a model with their own names, quicker than ``named_modules``."""
    found: list[tuple[str, nn.Module]] = []
    waiting: list[tuple[str, Any]] = [("", model)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):  # a module is one
            if isinstance(value, nn.Module):
                found.append((name, value))
            for key, item in value.items():
                if isinstance(item, (dict, list)):
                    waiting.append((key, item))
        else:
            for item in value:
                if isinstance(item, (dict, list)):
                    waiting.append((name, item))
    return found


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
