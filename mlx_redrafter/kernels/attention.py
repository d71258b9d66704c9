"""Attention of mlx-lm's models, and the use of `tree_attention` in it.

A model uses it while one tree is verified, in layers that attend to all tokens and keep 16-bit or
float32 rows; masks of other kinds, attention sinks and batches stay with MLX's kernels.

Axes: N nodes of a tree, S committed tokens, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import unwrap
from types import MethodType, ModuleType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.kernels.attention_source import HEAD_SIZES
from mlx_redrafter.kernels.layers import is_available
from mlx_redrafter.kernels.tree_attention import tree_attention
from mlx_redrafter.kernels.variant import DTYPES
from mlx_redrafter.target.caches.full import FullCache
from mlx_redrafter.target.hooks import Call, HookPoint, install
from mlx_redrafter.target.scoped import Scoped
from mlx_redrafter.trees.tree import TokenTree


@dataclass(frozen=True)
class AttentionShape:
    """Heads of an attention and their dtype.

    Attributes:
        heads: Heads of queries.
        key_heads: Heads of keys and values.
        head_size: D.
        dtype: Name of the dtype of queries, keys and values.
    """

    heads: int
    key_heads: int
    head_size: int
    dtype: str

    @property
    def is_offered(self) -> bool:
        """Whether there is a kernel for it."""
        return self.head_size in HEAD_SIZES and self.dtype in DTYPES

    def __str__(self) -> str:
        return (
            f"attention of {self.heads} heads, {self.key_heads} of keys, of {self.head_size}, "
            f"{self.dtype}"
        )


@dataclass(frozen=True)
class AttentionChoice:
    """What the attention of one shape uses.

    Attributes:
        shape: Its shape.
        most_keys: Most keys that a node may see where the kernel takes the place of MLX's.
        rows: Values of N for which it does.
    """

    shape: AttentionShape
    most_keys: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class AttentionChoices:
    """What a model uses: no tuple, which MLX would take for parameters.

    Attributes:
        shapes: Choices by shape.
    """

    shapes: tuple[AttentionChoice, ...]


_choices: ContextVar[AttentionChoices | None] = ContextVar("choices", default=None)
_seen: ContextVar[list[AttentionShape] | None] = ContextVar("seen", default=None)


def attention_shapes(model: nn.Module) -> dict[AttentionShape, int]:
    """Numbers of layers by the shape of their attention, where there is a kernel. Hooks the model.

    Found by a forward pass that is never computed.
    """
    for file in _files(model):
        install(HookPoint(file, scaled_dot_product_attention.__name__, _attend))
    found: list[AttentionShape] = []
    with Scoped(_seen, found):
        model(mx.array([[0]]), cache=make_prompt_cache(model))
    return {shape: found.count(shape) for shape in dict.fromkeys(found) if shape.is_offered}


def use_attention(model: nn.Module, chosen: AttentionChoices) -> None:
    """Let a model whose shapes `attention_shapes` has found use the kernel from now on."""
    model.redrafter_kernel = chosen
    install(HookPoint(model, "__call__", _run))


def _files(model: nn.Module) -> Iterator[ModuleType]:
    """The files of a model's layers that import mlx-lm's function."""
    for name in dict.fromkeys(type(module).__module__ for module in model.modules()):
        file = sys.modules[name]
        function = vars(file).get(scaled_dot_product_attention.__name__)
        if function and unwrap(function) is scaled_dot_product_attention:
            yield file


def _run(call: MethodType, *args: Any, **kwargs: Any) -> Any:
    """Hook for a model that uses the kernel."""
    with Scoped(_choices, cast(Any, call.__self__).redrafter_kernel):
        return call(*args, **kwargs)


def _attend(
    call: Call,
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    **options: Any,
) -> mx.array:
    """Hook for mlx-lm's attention: nodes of a tree see their own paths only."""
    seen, choices, tree = _seen.get(), _choices.get(), _tree(cache, mask)
    shape = None
    no_options = not any(value is not None for value in options.values())
    if no_options and (seen is not None or tree is not None):
        shape = _shape(queries, keys, values)
    if seen is not None and shape is not None:
        seen.append(shape)
    if shape is not None and tree is not None and choices is not None and is_available():
        most_keys = keys.shape[2] - tree.size + tree.max_depth + 1
        for choice in choices.shapes:
            if choice.shape == shape and tree.size in choice.rows and most_keys <= choice.most_keys:
                return tree_attention(queries, keys, values, tree.parents, scale)
    return cast(mx.array, call(queries, keys, values, cache, scale, mask, **options))


def _shape(queries: mx.array, keys: Any, values: Any) -> AttentionShape | None:
    """Shape of an attention; None where rows are quantised or not alike."""
    if not isinstance(keys, mx.array) or keys.shape != values.shape:
        return None
    if (queries.dtype, queries.shape[3]) != (keys.dtype, keys.shape[3]):
        return None
    dtype = str(keys.dtype).removeprefix("mlx.core.")
    return AttentionShape(queries.shape[1], keys.shape[1], keys.shape[3], dtype)


def _tree(cache: Any, mask: Any) -> TokenTree | None:
    """The tree that is verified where a mask is one of committed tokens and ancestors alone."""
    if type(cache) is not FullCache or cache.step.tree is None or mask is not cache.step.tree_mask:
        return None
    return cache.step.tree
