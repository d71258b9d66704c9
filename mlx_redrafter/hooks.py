"""Hooks into stock mlx-lm modules that act only while a tree or a hidden state is asked for.

A hooked module gets a subclass of its own class whose ``__call__`` looks at a context variable and
otherwise calls the original, so parameters, paths and results of the stock model stay as they are,
and requests in other threads do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Call = Callable[..., Any]
Hook = Callable[..., Any]

_positions: ContextVar[mx.array | None] = ContextVar("positions", default=None)
_outputs: ContextVar[list[mx.array] | None] = ContextVar("outputs", default=None)


@contextmanager
def tree_positions(positions: mx.array) -> Iterator[None]:
    """Place the tokens of forward passes built inside at ``positions``, int32, shape (N,)."""
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)


@contextmanager
def captured_output() -> Iterator[list[mx.array]]:
    """Collect the outputs of modules hooked with `capture` that are called inside."""
    outputs: list[mx.array] = []
    token = _outputs.set(outputs)
    try:
        yield outputs
    finally:
        _outputs.reset(token)


def install(module: nn.Module, hook: Hook) -> None:
    """Route calls of ``module`` through ``hook``; installing the same hook again does nothing.

    Args:
        module: Any module; its class is replaced by a subclass with the same name.
        hook: Called with the original bound ``__call__`` and the arguments of the call.
    """
    if getattr(type(module), "redrafter_hook", None) is not hook:
        module.__class__ = _hooked(type(module), hook)


def rotate_at_tree_positions(call: Call, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
    """Hook for rope modules: rotate each node of a tree by its own position.

    ``mx.fast.rope`` takes one offset per batch row, so the sequence axis is presented as batch.
    """
    positions = _positions.get()
    if positions is None:
        return call(x, *args, **kwargs)
    rotated = call(x.transpose(2, 1, 0, 3), offset=positions)  # (1, H, N, D) -> (N, H, 1, D)
    return rotated.transpose(2, 1, 0, 3)


def capture(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Hook for a backbone: remember what it returns while `captured_output` is active."""
    result = call(*args, **kwargs)
    outputs = _outputs.get()
    if outputs is not None:
        outputs.append(result)
    return result


@lru_cache(maxsize=None)
def _hooked(base: type[nn.Module], hook: Hook) -> type[nn.Module]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return hook(base.__call__.__get__(self), *args, **kwargs)

    namespace = {"__call__": __call__, "__module__": base.__module__, "redrafter_hook": hook}
    return type(base.__name__, (base,), namespace)
