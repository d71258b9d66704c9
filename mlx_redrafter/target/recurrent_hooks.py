"""Hooks that let recurrent layers of mlx-lm's models follow the branches of a tree.

Axes: B sequences, N nodes of each tree, H heads, S kernel size of a convolution, C its channels
or the size of a hidden state.

A layer with a state runs its projections over all nodes as over consecutive tokens. Hooks replace
its convolutions and its recurrence, in the order of their arrays in the layer's cache.
"""

from contextvars import ContextVar
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.ssm import compute_dt

from mlx_redrafter.target.ancestor_matrix import BranchStates, follow_delta_rule, follow_updates
from mlx_redrafter.target.caches.recurrent import cache_among
from mlx_redrafter.target.caches.tree_pass import BranchedState, BranchPart, Paths, State
from mlx_redrafter.target.hooks import Call, Scoped
from mlx_redrafter.trees.tree import TreeBatch


class _Layer(NamedTuple):
    """A layer during its call, with the arrays of its cache so far."""

    trees: TreeBatch
    parts: list[BranchPart]


class _Rows(NamedTuple):
    """Inputs of a causal convolution before and at the nodes of trees.

    ``rows`` are those that the convolution of each node reads, int32, shape (B N, S).
    """

    inputs: mx.array
    rows: mx.array

    def array_after(self, paths: Paths) -> mx.array:
        return self.inputs[self.rows[paths.last, 1:]]


class _Nodes(NamedTuple):
    """Rows of the nodes of all trees."""

    rows: mx.array

    def array_after(self, paths: Paths) -> mx.array:
        return self.rows[paths.last]


_layer: ContextVar[_Layer | None] = ContextVar("layer", default=None)


def follow_branches(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Hook for a layer with a state, whose convolutions and recurrence have hooks too."""
    cache = cache_among(*args, *kwargs.values())
    if cache is None or cache.trees is None:
        return call(*args, **kwargs)
    parts: list[BranchPart] = []
    with Scoped(_layer, _Layer(cache.trees, parts)):
        result = call(*args, **kwargs)
    cache.branch(BranchedState(parts))
    return result


def follow_depths(call: Call, x: mx.array, *args: Any, **kwargs: Any) -> Any:
    """Hook for any layer with a state whose only input with one row per token is ``x``, (B, N, C).

    It computes the layer one depth after the other. The nodes at one depth are a batch of single
    tokens, each with the state of its parent. Unlike the other hooks, this one reads a layer's
    weights once per depth and keeps the state of every node until the next pass. It blocks until
    MLX has computed the drafts if the host does not know the trees.
    """
    cache = cache_among(*args, *kwargs.values())
    if cache is None:
        return call(x, *args, **kwargs)

    def run(rows: mx.array, stock: Any) -> mx.array:
        given = [stock if arg is cache else arg for arg in args]
        named = {name: stock if arg is cache else arg for name, arg in kwargs.items()}
        return call(rows, *given, **named)

    trees, rows = cache.step.trees, x.flatten(0, 1)
    if trees is None:
        return run(x, cache.stock)
    # Depth of each node, and its place among the nodes of that depth.
    places = {n: (d, i) for d, ns in enumerate(trees.nodes_by_depth) for i, n in enumerate(ns)}
    states: list[State] = [list(cache.stock.cache)]
    outputs = []
    for depth, nodes in enumerate(trees.nodes_by_depth):
        before = [places[trees.parents_in_all[node]][1] for node in nodes]
        batch = ArraysCache(len(states[0]))
        for index, array in enumerate(states[depth]):
            if array is not None and before != list(range(len(array))):
                array = array[mx.array(before)]
            batch[index] = array
        outputs.append(run(rows[mx.array(nodes)][:, None], batch))
        states.append(list(batch.cache))

    def state_after(paths: Paths) -> State:
        found = []
        for slot, path in enumerate(paths.paths):
            depth, place = places[slot * paths.num_nodes + path[-1]]
            arrays = (array for array in states[depth + 1] if array is not None)
            found.append([array[place : place + 1] for array in arrays])
        return [mx.concatenate(list(arrays)) for arrays in zip(*found, strict=True)]

    cache.branch(state_after)
    order = np.argsort([node for nodes in trees.nodes_by_depth for node in nodes])
    return mx.concatenate(outputs)[mx.array(order)].reshape(*x.shape[:2], -1)


def convolve_branches(call: Call, x: mx.array) -> mx.array:
    """Hook for a causal convolution: the inputs of a node are the last S tokens of its branch.

    ``x`` has S - 1 rows before each root and the rows of the nodes, shape (B, S - 1 + N, C).
    """
    layer = _layer.get()
    if layer is None:
        return call(x)
    size, inputs = x.shape[1] - layer.trees.size + 1, x.flatten(0, 1)
    rows = layer.trees.window_rows(size)
    layer.parts.append(_Rows(inputs, rows))
    convolved: mx.array = call(inputs[rows])
    return convolved.reshape(x.shape[0], layer.trees.size, -1)


def convolve_short(call: Call, x: mx.array, **kwargs: Any) -> Any:
    """Hook for LFM2's short convolution, where a layer and the convolution in it are ``conv``.

    Only the layer gets keywords.
    """
    return follow_branches(call, x, **kwargs) if kwargs else convolve_branches(call, x)


def convolve_pairs(
    call: Call, x: mx.array, weights: mx.array, state: mx.array | None = None
) -> mx.array:
    """Hook for Baichuan's convolution of keys or values over a node and its parent.

    ``x`` has the rows of the nodes, shape (B, H, N, size of a head), and ``state`` the row before
    each root, shape (B, H, 1, size of a head).
    """
    layer = _layer.get()
    if layer is None:
        return call(x, weights, state=state)
    before = mx.zeros_like(x[:, :, :1]) if state is None else state
    inputs = mx.concatenate([before, x], axis=2).swapaxes(1, 2).flatten(0, 1)[:, :, None]
    above = inputs[layer.trees.window_rows(2)[:, 0]]
    nodes = x.swapaxes(1, 2).flatten(0, 1)[:, :, None]
    layer.parts.append(_Nodes(nodes))
    convolved: mx.array = call(nodes, weights, state=above)
    return convolved.reshape(x.shape[0], -1, *x.shape[1::2]).swapaxes(1, 2)


def update_delta_rule(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Hook for mlx-lm's ``gated_delta_update`` with one gate per head."""
    layer = _layer.get()
    return call(*args, **kwargs) if layer is None else _follow_delta_rule(layer, *args, **kwargs)


def update_state_space(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Hook for mlx-lm's ``ssm_update``, the recurrence of Mamba-2."""
    layer = _layer.get()
    return call(*args, **kwargs) if layer is None else _follow_state_space(layer, *args, **kwargs)


def _follow_delta_rule(
    layer: _Layer,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array | None]:
    """Compute ``gated_delta_update`` for a tree; returns the state as it was."""
    num_heads = v.shape[2]
    keys, values = _by_head(k, num_heads), _by_head(v, num_heads)
    strengths = mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0)
    strengths = _by_head(strengths[..., None], num_heads)
    log_gates = -mx.exp(A_log.astype(mx.float32)) * nn.softplus(a + dt_bias)
    before = _state(state, values, keys)
    y, updates, log_decays = follow_delta_rule(
        _by_head(q, num_heads),
        keys,
        values,
        strengths,
        _by_head(log_gates[..., None], num_heads),
        before,
        layer.trees.ancestors,
        layer.trees.above,
        max(layer.trees.max_depths),
    )
    layer.parts.append(BranchStates(before, keys, updates, log_decays))
    return y.swapaxes(1, 2).astype(q.dtype), state


def _follow_state_space(
    layer: _Layer,
    x: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """Compute ``ssm_update`` for a tree; returns the state as it was."""
    num_heads = x.shape[2]
    dt = compute_dt(dt, dt_bias, time_step_limit).swapaxes(1, 2)[..., None]
    inputs, keys = _by_head(x, num_heads), _by_head(B, num_heads)
    updates, before = dt * inputs, _state(state, inputs, keys)
    y, log_decays = follow_updates(
        _by_head(C, num_heads),
        keys,
        updates,
        -_rates(A_log)[:, None, None] * dt,
        before,
        layer.trees.ancestors,
    )
    layer.parts.append(BranchStates(before, keys, updates, log_decays))
    y = y + D.astype(mx.float32)[:, None, None] * inputs
    return y.swapaxes(1, 2).astype(x.dtype), state


def _by_head(x: mx.array, num_heads: int) -> mx.array:
    """Repeat rows of nodes, shape (B, N, groups, D), for each head, float32, (B, H, N, D)."""
    rows = x.swapaxes(1, 2).astype(mx.float32)
    return mx.repeat(rows, num_heads // rows.shape[1], axis=1)


def _state(state: mx.array | None, values: mx.array, keys: mx.array) -> mx.array:
    """Return a layer's state in float32, or zeros before the first token."""
    if state is None:
        return mx.zeros((*values.shape[:2], values.shape[3], keys.shape[3]))
    return state.astype(mx.float32)


def _rates(A_log: mx.array) -> mx.array:
    """Compute exp(A_log) in float32, with mlx-lm's rounding, which depends on the device."""
    if mx.metal.is_available() and mx.default_device() == mx.gpu:
        A_log = A_log.astype(mx.float32)
    return mx.exp(A_log).astype(mx.float32)
