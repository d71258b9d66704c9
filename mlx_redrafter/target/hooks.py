"""Hooks into stock mlx-lm code that act only while a context variable asks for them.

`install` replaces a module's class by a subclass whose method calls the hook. Without a context
variable the hook calls the original. So parameters, paths and results of the stock model stay as
they are, and threads do not affect each other. Functions of mlx-lm are wrapped in the same way.

Axes: B sequences of a batch, N nodes of each tree, H heads, D head size.
"""

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial, update_wrapper
from inspect import unwrap
from types import MethodType, ModuleType
from typing import Any, Generic, NamedTuple, SupportsIndex, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_redrafter.errors import UnsupportedTargetError

# In a list of layers to capture, the last layer's output after the final norm.
FINAL = -1

Call = Callable[..., Any]
Hook = Callable[..., Any]
T = TypeVar("T")


class Scoped(Generic[T]):
    """A value of a context variable inside a ``with`` block.

    A class, because every token enters two of these blocks, and one made by contextlib costs more
    than twice the time.
    """

    def __init__(self, variable: ContextVar[T | None], value: T):
        self._variable = variable
        self._value = value

    def __enter__(self) -> T:
        self._token = self._variable.set(self._value)
        return self._value

    def __exit__(self, *error: object) -> None:
        self._variable.reset(self._token)


class UntraceableError(Exception):
    """A model needs numbers on the host that a pass compiled for any length does not have."""


@dataclass(frozen=True)
class TreePositions:
    """Positions of the nodes of trees.

    Attributes:
        nodes: Position of every node, int32, shape (B, N).
        spans: Positions that the nodes of each tree may have; None in a pass that MLX compiles for
            any length.
    """

    nodes: mx.array
    spans: Sequence[range] | None

    @cached_property
    def flat(self) -> mx.array:
        """Positions of the nodes of all trees in order, shape (B N,)."""
        return self.nodes.reshape(-1)

    @property
    def known(self) -> Sequence[range]:
        """The spans; raises `UntraceableError` if MLX compiles the pass."""
        if self.spans is None:
            raise UntraceableError("expected positions on the host, found a pass for any length")
        return self.spans

    @property
    def all(self) -> list[int]:
        """All positions that nodes may have, in order; raises what `known` does."""
        return sorted(set().union(*self.known))


class HookPoint(NamedTuple):
    """A place to install a hook: a method of an mlx module, or a function of a Python module.

    ``hook`` gets every call: the original first, then the arguments.
    """

    owner: nn.Module | ModuleType
    name: str
    hook: Hook


_positions: ContextVar[TreePositions | None] = ContextVar("positions", default=None)
_captured: ContextVar[dict[int, mx.array] | None] = ContextVar("captured", default=None)
_replacement: ContextVar[mx.array | None] = ContextVar("replacement", default=None)


def tree_positions(positions: TreePositions) -> Scoped[TreePositions]:
    """Place the tokens of forward passes built inside at these positions."""
    return Scoped(_positions, positions)


def is_verifying() -> bool:
    """Whether a forward pass over a tree is being built."""
    return _positions.get() is not None


def captured() -> Scoped[dict[int, mx.array]]:
    """Collect the inputs of modules hooked with `capture_input`, by the ``id`` of the module.

    The output of a module hooked with `capture` comes under `FINAL`.
    """
    return Scoped(_captured, {})


def replaced_output(output: mx.array) -> Scoped[mx.array]:
    """Let modules hooked with `capture` that are called inside return ``output``."""
    return Scoped(_replacement, output)


def install(point: HookPoint) -> None:
    """Route the calls of a method or function through a hook, unless it is installed already.

    A module's class becomes a subclass with the same name.
    """
    owner, name, hook = point
    if isinstance(owner, ModuleType):
        function = getattr(owner, name)
        installed = getattr(function, "redrafter_hooks", ())
        if hook not in installed:
            wrapped = update_wrapper(partial(hook, function), function)
            wrapped.redrafter_hooks = (*installed, hook)  # type: ignore[attr-defined]
            setattr(owner, name, wrapped)
    elif (name, hook) not in getattr(type(owner), "redrafter_hooks", ()):
        owner.__class__ = _hooked(type(owner), name, hook)


def install_in_attention(model: nn.Module, hook: Hook) -> None:
    """Install a hook for mlx-lm's attention function in the files of a model's layers.

    Models give it queries, keys and values by place, and ``cache``, ``scale`` and others by name.
    """
    name = scaled_dot_product_attention.__name__
    for file_name in dict.fromkeys(type(module).__module__ for module in model.modules()):
        file = sys.modules[file_name]
        function = vars(file).get(name)
        if function and unwrap(function) is scaled_dot_product_attention:
            install(HookPoint(file, name, hook))


def rotate_at_tree_positions(call: Call, x: mx.array, offset: Any = 0, **kwargs: Any) -> mx.array:
    """Hook for rotary embeddings: rotate each node of a tree by its own position.

    ``mx.fast.rope`` takes one offset per batch row, so the sequence axis is presented as batch.
    """
    positions = _positions.get()
    if positions is None:
        return call(x, offset, **kwargs)
    rotated = call(_nodes_as_batch(x), offset=positions.flat, **kwargs)
    return _nodes_as_rows(rotated, x.shape[0])


def rotate_with_dynamic_base(call: MethodType, x: mx.array, offset: Any = 0) -> mx.array:
    """Hook for "dynamic" rotary embeddings, whose base depends on the number of tokens.

    A node at position p is rotated as the newest of p + 1 tokens, as in plain decoding.
    """
    positions = _positions.get()
    if positions is None:
        return call(x, offset)
    rope = cast(Any, call.__self__)
    num_texts, nodes = x.shape[0], positions.flat
    x = _nodes_as_batch(x)
    if positions.all[-1] < rope.max_position_embeddings:
        # Sequences of up to this length share one base.
        rotated = mx.fast.rope(
            x, rope.dims, traditional=rope.traditional, base=rope.base, scale=1.0, offset=nodes
        )
    else:
        rotated = x
        for position in positions.all:
            is_here = (nodes == position).reshape(-1, 1, 1, 1)
            rotated = mx.where(is_here, call(x, offset=position), rotated)
    return _nodes_as_rows(rotated, num_texts)


def embed_tree_positions(call: MethodType, position_ids: mx.array) -> mx.array:
    """Hook for learned position embeddings: look up the position of each node of a tree.

    Positions beyond the table get its last row. MLX would read foreign memory there, and a NaN in
    it would spread from a draft beyond the end to earlier nodes.
    """
    positions = _positions.get()
    ids = position_ids if positions is None else positions.nodes
    num_rows = cast(Any, call.__self__).weight.shape[0]
    return call(mx.minimum(ids, num_rows - 1))


def scale_at_tree_positions(
    call: Call, num_tokens: int, offset: Any, *args: Any, **kwargs: Any
) -> mx.array:
    """Hook for mlx-lm's Llama 4 attention scale: scale each node's query by its own position."""
    positions = _positions.get()
    if positions is None:
        return call(num_tokens, offset, *args, **kwargs)
    scale: mx.array = call(1, positions.flat, *args, **kwargs)
    return scale.reshape(positions.nodes.shape[0], 1, -1, 1)


def attend_in_chunks(call: MethodType, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
    """Hook for the attention of mlx-lm's Llama 4, whose model makes the mask of chunks itself.

    Layers without positions scale their queries by the number of whole periods before the next
    token. If the nodes of a tree lie in several periods, the hook computes the layer once for each.
    """
    positions = _positions.get()
    if positions is None:
        return call(x, mask, cache)
    mask, layer = cache.make_mask(x.shape[1]), cast(Any, call.__self__)
    if layer.use_rope or not layer.attn_temperature_tuning:
        return call(x, mask, cache)
    period = int(layer.floor_scale)
    if x.shape[1] > period:
        raise UnsupportedTargetError(
            f"expected trees of at most floor_scale = {period} nodes, found {x.shape[1]}; "
            "draft fewer nodes"
        )
    first, *others = sorted({(position + 1) // period for position in positions.all})
    result = call(x, mask, _ShiftedCache(cache, first * period - 1, cache.update_and_fetch))
    for number in others:
        is_here = ((positions.nodes + 1) // period == number)[..., None]
        again = _ShiftedCache(cache, number * period - 1, lambda *_: cache.keys_and_values())
        other = call(x, mask, again)
        result = mx.where(is_here, other, result)
    return result


def mask_groups(call: MethodType, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
    """Hook for Gemma 2's attention, whose scores have an axis for the heads that share a key head.

    The masks of a batch, shape (B, 1, N, entries), lack that axis.
    """
    if isinstance(mask, mx.array) and mask.ndim == 4 and cast(Any, call.__self__).repeats > 1:
        mask = mask[:, None]
    return call(x, mask, cache)


class _ShiftedCache:
    """A cache with another offset."""

    def __init__(self, cache: Any, offset: int, update_and_fetch: Call):
        self._cache = cache
        self.offset = offset
        self.update_and_fetch = update_and_fetch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def capture(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Hook for a backbone, for `captured` and `replaced_output`."""
    replacement, found = _replacement.get(), _captured.get()
    result = call(*args, **kwargs) if replacement is None else replacement
    if found is not None:
        found[FINAL] = result
    return result


def capture_input(call: MethodType, *args: Any, **kwargs: Any) -> Any:
    """Hook for a layer, for `captured`: its first argument, named or not."""
    found = _captured.get()
    if found is not None:
        found[id(call.__self__)] = next(iter((*args, *kwargs.values())))
    return call(*args, **kwargs)


def _nodes_as_batch(x: mx.array) -> mx.array:
    """Reshape (B, H, N, D) to (B N, H, 1, D)."""
    if x.shape[0] == 1:
        return x.swapaxes(0, 2)
    if x.shape[2] == 1:
        return x
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], 1, x.shape[3])


def _nodes_as_rows(x: mx.array, num_texts: int) -> mx.array:
    """Reshape (B N, H, 1, D) back to (B, H, N, D)."""
    if num_texts == 1:
        return x.swapaxes(0, 2)
    if x.shape[0] == num_texts:
        return x
    return x.reshape(num_texts, -1, x.shape[1], x.shape[3]).swapaxes(1, 2)


@cache
def _hooked(base: type[nn.Module], name: str, hook: Hook) -> type[nn.Module]:
    original = getattr(base, name)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return hook(MethodType(original, self), *args, **kwargs)

    stock: type[nn.Module] = getattr(base, "redrafter_stock", base)

    def reduce_ex(self: nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle and copy as the stock class; `install` hooks a copy when it becomes a target."""
        _, (_, *arguments), *state = cast(Any, super(stock, self).__reduce_ex__(protocol))
        return (dict.__new__, (stock, *arguments), *state)  # a module is a dict

    namespace = {
        name: update_wrapper(call, original),
        "__module__": base.__module__,
        "__reduce_ex__": reduce_ex,
        "redrafter_stock": stock,
        "redrafter_hooks": (*getattr(base, "redrafter_hooks", ()), (name, hook)),
    }
    return type(base.__name__, (base,), namespace)
