"""Attention of mlx-lm's models, and the use of `tree_attention` in it.

A model uses the kernel while the target verifies one tree, in layers that attend to all tokens and
keep K/V entries in 16 bits or float32. Other masks, attention sinks and batches use MLX's kernels.

Axes: N nodes of a tree, S committed tokens, D head size.
"""

from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.kernels.layers import is_available
from mlx_redrafter.kernels.tree_attention import HEAD_SIZES, tree_attention
from mlx_redrafter.kernels.variant import DTYPES, dtype_name
from mlx_redrafter.target.caches.full import FullCache
from mlx_redrafter.target.compiled_pass import TracedEntries
from mlx_redrafter.target.hooks import (
    Call,
    HookPoint,
    Scoped,
    UntraceableError,
    install,
    install_in_attention,
)
from mlx_redrafter.trees.tree import TokenTree


@dataclass(frozen=True)
class AttentionShape:
    heads: int
    key_heads: int
    head_size: int
    dtype: str

    def __str__(self) -> str:
        return (
            f"attention of {self.heads} heads, {self.key_heads} of keys, of {self.head_size}, "
            f"{self.dtype}"
        )


@dataclass(frozen=True)
class AttentionChoice:
    """Maximum number of keys and values of N with which attention of a shape uses the kernel."""

    shape: AttentionShape
    max_keys: int
    rows: tuple[int, ...]


_choices: ContextVar[Sequence[AttentionChoice] | None] = ContextVar("choices", default=None)
_seen: ContextVar[list[AttentionShape] | None] = ContextVar("seen", default=None)


def attention_shapes(model: nn.Module) -> dict[AttentionShape, int]:
    """Hook a model, and count its layers by shape of attention, for shapes that have a kernel.

    The shapes come from a forward pass that is never computed.
    """
    install_in_attention(model, _attend)
    found: list[AttentionShape] = []
    with Scoped(_seen, found):
        model(mx.array([[0]]), cache=make_prompt_cache(model))
    return Counter(one for one in found if one.head_size in HEAD_SIZES and one.dtype in DTYPES)


def use_attention(model: nn.Module, choices: Sequence[AttentionChoice]) -> None:
    """Let a model that `attention_shapes` has hooked use the kernel from now on."""
    # Set as an attribute, a tuple would be parameters to MLX.
    vars(model)["redrafter_kernel"] = tuple(choices)
    install(HookPoint(model, "__call__", _run))


def _run(call: MethodType, *args: Any, **kwargs: Any) -> Any:
    with Scoped(_choices, vars(call.__self__)["redrafter_kernel"]):
        return call(*args, **kwargs)


def _attend(
    call: Call, *arrays: Any, cache: Any, scale: float, mask: Any, **options: Any
) -> mx.array:
    """Hook for mlx-lm's attention: use the kernel if a choice of the model allows it."""
    queries, keys, values = arrays
    seen, choices, tree = _seen.get(), _choices.get(), _tree(cache, mask)
    if choices is not None and isinstance(cache, TracedEntries):
        raise UntraceableError("expected MLX's attention, found this package's kernel")
    shape = None
    no_options = not any(value is not None for value in options.values())
    if no_options and (seen is not None or tree is not None):
        shape = _shape(queries, keys, values)
    if seen is not None and shape is not None:
        seen.append(shape)
    if shape is not None and tree is not None and choices is not None and is_available():
        max_keys = keys.shape[2] - tree.size + tree.max_depth + 1
        for choice in choices:
            if choice.shape == shape and tree.size in choice.rows and max_keys <= choice.max_keys:
                return tree_attention(queries, keys, values, tree.parents, scale)
    return cast(mx.array, call(*arrays, cache=cache, scale=scale, mask=mask, **options))


def _shape(queries: mx.array, keys: Any, values: Any) -> AttentionShape | None:
    """Return the shape, or None if K/V entries are quantised or differ in shape or dtype."""
    if not isinstance(keys, mx.array) or keys.shape != values.shape:
        return None
    if (queries.dtype, queries.shape[3]) != (keys.dtype, keys.shape[3]):
        return None
    return AttentionShape(queries.shape[1], keys.shape[1], keys.shape[3], dtype_name(keys.dtype))


def _tree(cache: Any, mask: Any) -> TokenTree | None:
    """Return the tree whose mask allows all committed tokens and a node's ancestors, or None."""
    step = cache.step if type(cache) is FullCache else None
    if step is None or step.trees is None or step.has_buckets or mask is not step.layout().mask:
        return None
    return cast(TokenTree, step.trees.drafts[0])
