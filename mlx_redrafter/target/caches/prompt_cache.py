"""Checks of prompt caches that callers give, so that decoding can continue them exactly."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from mlx_redrafter.errors import ConfigError, UnsupportedTargetError
from mlx_redrafter.target.caches.cache_kinds import describe
from mlx_redrafter.target.caches.tree_cache import parts_of

# Advice at the end of error messages.
ADVICE = "make it with mlx_lm.models.cache.make_prompt_cache(model)"


def check_prompt_cache(layers: Sequence[Any], own: Sequence[Any]) -> None:
    """Check that caches fit a model and hold one whole sequence.

    A ``KVCache`` that mlx-lm has quantised, as it does with ``kv_bits``, fits as well. ``own`` are
    the model's caches after a pass over any token; those of layers that it never uses are empty.
    """
    if len(layers) != len(own):
        raise ConfigError(
            f"prompt_cache has {len(layers)} layers, the model needs {len(own)}; {ADVICE}"
        )
    own = [_quantised_as(layer, example) for layer, example in zip(layers, own, strict=True)]
    for layer, example in zip(layers, own, strict=True):
        if type(layer) is not type(example) or describe(layer) != describe(example):
            raise UnsupportedTargetError(
                f"expected {describe(example)} as mlx_lm.models.cache.make_prompt_cache(model) "
                f"makes it, found {describe(layer)}, in which a tree would not be decoded "
                "exactly; use mlx-lm itself for it"
            )
    if all(map(_is_empty, parts_of(layers))):
        return
    used = []
    for number, pair in enumerate(zip(layers, own, strict=True)):
        for part, example in zip(*(parts_of([one]) for one in pair), strict=True):
            check = _check_state if isinstance(example, ArraysCache) else _check_rows
            check(number, part, example)
            if not _is_empty(example):
                used.append(part)
    states = [layer for layer in used if isinstance(layer, ArraysCache)]
    lengths = sorted({layer.offset for layer in used if layer not in states})
    if not lengths:
        raise ConfigError(
            "prompt_cache does not say how many tokens it holds, as no layer of the model counts "
            "them; give the whole text as the prompt, and no prompt_cache or an empty one"
        )
    if len(lengths) > 1:
        raise ConfigError(
            f"prompt_cache has layers of {lengths[0]} to {lengths[-1]} tokens, but they must hold "
            f"the same text; {ADVICE} and process the text again"
        )
    if any(_is_empty(state) != (lengths[0] == 0) for state in states):
        raise ConfigError(
            f"prompt_cache has layers of {lengths[0]} tokens and others whose state is that of "
            f"another number; {ADVICE} and process the text again"
        )


def num_tokens(layers: Sequence[Any]) -> int | None:
    """Return the number of tokens that caches hold, or None if no layer counts them."""
    counts = [layer.offset for layer in parts_of(layers) if not isinstance(layer, ArraysCache)]
    return max(counts) if counts else None


def _is_empty(layer: Any) -> bool:
    if isinstance(layer, ArraysCache):
        return all(array is None for array in layer.cache)
    return layer.keys is None and layer.offset == 0


def _check_state(number: int, layer: ArraysCache, example: ArraysCache) -> None:
    if layer.lengths is not None or layer.left_padding is not None or layer.batch_size > 1:
        raise ConfigError(
            f"prompt_cache holds a batch of {layer.batch_size} texts; give the cache of one of them"
        )
    found, expected = (
        [getattr(array, "shape", None) for array in one.cache] for one in (layer, example)
    )
    if found != expected and not _is_empty(layer):
        raise ConfigError(
            f"prompt_cache has a state of the shapes {found} in layer {number}, the model's has "
            f"{expected}; {ADVICE}"
        )


def _quantised_as(layer: Any, example: Any) -> Any:
    """Quantise the example if the layer is quantised."""
    if type(layer) is not QuantizedKVCache or type(example) is not KVCache:
        return example
    try:
        return example.to_quantized(layer.group_size, layer.bits)
    except (ValueError, TypeError):  # bits or a group size from a damaged file
        return example


def _check_rows(number: int, layer: Any, example: Any) -> None:
    rows = zip_longest(_named_rows(layer), _named_rows(example), fillvalue=("rows", None))
    for (name, part), (_, other) in rows:
        found, expected = _shape(part), _shape(other)
        batch, heads, num_rows, size = found
        if batch > 1:
            raise ConfigError(
                f"prompt_cache holds a batch of {batch} texts; give the cache of one of them"
            )
        if batch and (heads, size) != (expected[1], expected[3]):
            raise ConfigError(
                f"prompt_cache has {name} of {heads} heads of size {size} in layer {number}, the "
                f"model's are {expected[1]} of size {expected[3]}; {ADVICE}"
            )
        # A ring and a chunk hold the last tokens only.
        offset, first = layer.offset, getattr(layer, "start_position", 0)
        are_ints = isinstance(offset, int) and isinstance(first, int)
        most = getattr(layer, "max_size", offset)
        if not are_ints or not 0 <= min(offset - first, most) <= num_rows:
            raise ConfigError(
                f"prompt_cache says that layer {number} holds {offset!r} tokens, but has "
                f"{num_rows} entries of {name}; {ADVICE}"
            )


def _named_rows(cache: Any) -> list[tuple[str, Any]]:
    """List keys and values, or their codes, scales and biases if they are quantised."""
    rows = [(name, getattr(cache, name)) for name in ("keys", "values")]
    return [
        (name, part)
        for name, parts in rows
        for part in (parts if isinstance(parts, (tuple, list)) else [parts])
    ]


def _shape(rows: Any) -> tuple[int, ...]:
    """Return batch, heads, entries and size of keys or values, or zeros if there are none."""
    shape = getattr(rows, "shape", ())
    return shape if len(shape) == 4 else (int(rows is not None), 0, 0, 0)
