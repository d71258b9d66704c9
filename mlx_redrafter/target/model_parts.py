"""Find the parts of an mlx-lm model, and reject models that would not be decoded exactly.

`check_config` reads a config alone, before any weights. `find_parts` reads the model itself.
"""

import reprlib
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING

from mlx_redrafter.errors import CheckpointError, UnsupportedTargetError
from mlx_redrafter.target.architectures import (
    ARCHITECTURES,
    CONTEXT_LENGTH_KEYS,
    REFUSED,
    ROPE_HOOKS,
    WRAPPERS,
    Config,
)
from mlx_redrafter.target.caches.cache_kinds import LAYER_CACHES, describe, holds_trees
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.hooks import HookPoint, capture, install

# Package of mlx-lm's model files.
MLX_LM_MODELS = "mlx_lm.models."
# Maximum of a size in a config file, far above any model's.
MAX_SIZE = 2**24
# Maximum number of layers in a config file, far above any model's.
MAX_LAYERS = 2**12
# Keys of the number of layers, in the configs of different families.
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Keys of sizes that allocate memory.
SIZE_KEYS = ("vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head", "head_dim")
# Keys of rope scaling.
ROPE_KEYS = ("rope_scaling", "rope_parameters")


class Parts(NamedTuple):
    """The parts of a model that `Target` needs, and describes.

    ``hooks`` begins with the hook for the output that enters the LM head.
    """

    hooks: list[HookPoint]
    embedding: nn.Module
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int | None


def check_config(config: Config) -> None:
    """Check by its ``config.json`` alone that a model can be decoded exactly."""
    name = config.get("model_type")
    if not isinstance(name, str):
        raise _refusal("a config.json without model_type", "its architecture is unknown")
    if config.get("model_file") is not None:
        raise _refusal(f"model_type {name!r} with code of its own", "that code is unknown here")
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "bitnet":
        raise _refusal("bitnet quantization", REFUSED["bitnet"])
    text_name, text_config = _find_text_config(MODEL_REMAPPING.get(name, name), config)
    _check_values(text_config)
    _check_text_config(name, text_name, text_config)


def _check_values(config: Config) -> None:
    """Reject values with which building the model could exhaust time or memory."""
    for key, value in config.items():
        if value is None:
            continue
        expected = None
        if key in ROPE_KEYS and not isinstance(value, Mapping):
            expected = "an object or null"
        elif key == "layer_types" and not isinstance(value, list):
            expected = "a list or null"
        elif key in (*LAYER_KEYS, *SIZE_KEYS, *CONTEXT_LENGTH_KEYS):
            high = MAX_LAYERS if key in LAYER_KEYS else MAX_SIZE
            if type(value) is not int or not 1 <= value <= high:
                expected = f"an integer from 1 to {high}"
        if expected is not None:
            found = reprlib.repr(value)
            raise CheckpointError(
                f"config.json says {key} {found}, expected {expected}; download the model again"
            )


def find_parts(model: nn.Module) -> Parts:
    """Find the parts of a model, and check that it is supported."""
    name = _file_name(model)
    text_model, text_name = model, name
    if name in WRAPPERS:
        text_model = model.language_model
        inner = _file_name(text_model)
        text_name = inner if inner in WRAPPERS[name] else WRAPPERS[name][0]
    # mlx-lm's files keep the arguments of a model under two names.
    args = vars(getattr(text_model, "args", None) or text_model.config)
    _check_text_config(name, text_name, args)
    caches = make_prompt_cache(model)
    _check_caches(name, caches)

    architecture = ARCHITECTURES[text_name]
    hidden = attrgetter(architecture.hidden)(text_model)
    embedding = attrgetter(architecture.embedding)(text_model)
    table = getattr(embedding, "embedding", embedding)  # inside a LoRA layer
    positions = list(_find_position_hooks(name, text_name, text_model))
    if not positions:
        raise _refusal(f"model_type {name!r} without positions", "nothing in it places tokens")
    lengths = () if num_tokens(caches) is None else map(args.get, CONTEXT_LENGTH_KEYS)
    return Parts(
        hooks=[HookPoint(hidden, "__call__", capture), *positions],
        embedding=embedding,
        num_layers=len(caches),
        # Shape of a row that is never computed, because quantised weights are packed.
        hidden_size=embedding(mx.zeros((1,), dtype=mx.int32)).shape[-1],
        vocab_size=table.weight.shape[0],
        context_length=next(filter(None, lengths), None),
    )


def hook_positions(network: nn.Module) -> None:
    """Let mlx-lm's rotary embeddings in a network rotate tree nodes by their own positions."""
    for leaf, module in _named_modules(network):
        for point in _find_rope_hook(type(network).__name__, leaf, module):
            install(point)


def _find_text_config(name: str, config: Config) -> tuple[str, Config]:
    """Return the model type and the config of the language model."""
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
        unknown = "its type is not among those that were verified"
        raise _refusal(f"model_type {name!r}", REFUSED.get(text_name, unknown))
    for kind in _rope_kinds(config):
        if kind not in architecture.ropes:
            raise _refusal(
                f"model_type {name!r} with rope scaling {kind!r}",
                f"verified with rope scaling {', '.join(architecture.ropes)} only",
            )


def _rope_kinds(config: Config) -> set[str]:
    scalings = [config.get(key) for key in ROPE_KEYS]
    # Some families have one scaling for each type of layer.
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
            f"only {', '.join(kind.__name__ for kind in LAYER_CACHES)} can hold a tree",
        )


def _find_position_hooks(name: str, text_name: str, model: nn.Module) -> Iterator[HookPoint]:
    architecture = ARCHITECTURES[text_name]
    for leaf, module in _named_modules(model):
        yield from _find_rope_hook(name, leaf, module)
        for (owner, method), hook in architecture.methods.items():
            if owner == leaf:
                yield HookPoint(module, method, hook)
    for function, hook in architecture.functions.items():
        yield HookPoint(sys.modules[MLX_LM_MODELS + text_name], function, hook)


def _named_modules(value: Any, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """List all modules of a model by their own names, faster than ``named_modules``."""
    if isinstance(value, nn.Module):  # a dict, too
        yield name, value
    items = value.items() if isinstance(value, dict) else ((name, item) for item in value)
    for key, item in items:
        if isinstance(item, (dict, list)):
            yield from _named_modules(item, key)


def _find_rope_hook(name: str, leaf: str, rope: nn.Module) -> Iterator[HookPoint]:
    """Find the hook of a module called ``leaf``, if it is a rotary embedding."""
    if "rope" not in leaf and "rotary" not in leaf:
        return
    kind = type(rope).__name__
    if kind not in ROPE_HOOKS:
        raise _refusal(
            f"model_type {name!r} with a {kind}", "this package has no hook for its positions"
        )
    hook = ROPE_HOOKS[kind]
    if hook is not None:
        yield HookPoint(rope, "__call__", hook)


def _file_name(model: nn.Module) -> str:
    """Return the name of the mlx-lm file that defines the model's class."""
    module = type(model).__module__
    if not module.startswith(MLX_LM_MODELS):
        raise _refusal(f"a model class from {module}", "that code is unknown here")
    return module.removeprefix(MLX_LM_MODELS)


def _refusal(found: str, reason: str) -> UnsupportedTargetError:
    return UnsupportedTargetError(
        f"{found} cannot be decoded exactly: {reason}; use mlx_lm.generate, if mlx-lm knows it"
    )
