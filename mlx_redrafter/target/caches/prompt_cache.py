"""Caches from outside: what they must be for the next text to follow theirs exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_redrafter.errors import ConfigError, UnsupportedTargetError
from mlx_redrafter.target.caches.kinds import describe

ADVICE = "make it with mlx_lm.models.cache.make_prompt_cache(model)"


def check_prompt_cache(layers: Sequence[Any], own: Sequence[Any]) -> None:
    """Check that caches hold the rows of one text, and that they are the model's.

    Args:
        layers: Caches from outside, one per layer.
        own: The model's caches after a pass over any token; those of layers without rows are empty.

    Raises:
        ConfigError: They are another model's, or hold several texts, or parts of one.
        UnsupportedTargetError: One is not of the model's own kind.
    """
    if len(layers) != len(own):
        raise ConfigError(
            f"prompt_cache has {len(layers)} layers, the model needs {len(own)}; {ADVICE}"
        )
    for layer, example in zip(layers, own, strict=True):
        if type(layer) is not type(example) or describe(layer) != describe(example):
            raise UnsupportedTargetError(
                f"expected {describe(example)} as mlx_lm.models.cache.make_prompt_cache(model) "
                f"makes it, found {describe(layer)}, in which a tree would not be decoded "
                "exactly; use mlx-lm itself for it"
            )
    if all(layer.keys is None and layer.offset == 0 for layer in layers):
        return
    for number, (layer, example) in enumerate(zip(layers, own, strict=True)):
        _check_rows(number, layer, example)
    lengths = sorted({layer.offset for layer, one in zip(layers, own, strict=True) if one.offset})
    if len(lengths) > 1:
        raise ConfigError(
            f"prompt_cache has layers of {lengths[0]} to {lengths[-1]} tokens, but they must hold "
            f"the same text; {ADVICE} and process the text again"
        )


def _check_rows(number: int, layer: Any, example: Any) -> None:
    for name in ("keys", "values"):
        found, expected = (_shape(getattr(one, name)) for one in (layer, example))
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
        # A window keeps its last tokens only.
        if not isinstance(layer.offset, int) or not (
            0 <= min(layer.offset, getattr(layer, "max_size", layer.offset)) <= num_rows
        ):
            raise ConfigError(
                f"prompt_cache says that layer {number} holds {layer.offset!r} tokens, but has "
                f"{num_rows} rows of {name}; {ADVICE}"
            )


def _shape(rows: Any) -> tuple[int, ...]:
    """Batch, heads, rows and size of keys or values; zeros where there are none."""
    shape = getattr(rows, "shape", ())
    return shape if len(shape) == 4 else (int(rows is not None), 0, 0, 0)
