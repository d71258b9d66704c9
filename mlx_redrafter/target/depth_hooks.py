"""A hook that computes any recurrent layer over a tree, one depth after the other.

The nodes at one depth are a batch of single tokens, each with the state of its parent. Unlike the
hooks in `recurrent_hooks`, this one reads a layer's weights once per depth and keeps the state of
every node until the next tree. It blocks until MLX has computed the draft if the host does not know
the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_redrafter.target.caches.recurrent import RecurrentCache, State
from mlx_redrafter.target.hooks import Call


def follow_depths(call: Call, x: mx.array, *args: Any, **kwargs: Any) -> Any:
    """Hook for a layer with a state whose only input with one row per token is ``x``, (1, N, H)."""
    caches = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, RecurrentCache)]
    if not caches:
        return call(x, *args, **kwargs)
    cache = caches[0]

    def run(rows: mx.array, stock: ArraysCache) -> mx.array:
        given = [stock if arg is cache else arg for arg in args]
        named = {name: stock if arg is cache else arg for name, arg in kwargs.items()}
        result: mx.array = call(rows, *given, **named)
        return result

    if cache.tree is None:
        return run(x, cache.stock)
    nodes_by_depth, parents = cache.step.nodes_by_depth, cache.step.parents
    place = {node: index for nodes in nodes_by_depth for index, node in enumerate(nodes)}
    states: list[State] = [list(cache.stock.cache)]
    outputs = []
    for depth, nodes in enumerate(nodes_by_depth):
        above = mx.array([place[parents[node]] if depth else 0 for node in nodes])
        batch = ArraysCache(len(states[0]))
        for index, array in enumerate(states[depth]):
            batch[index] = None if array is None else array[above]
        outputs.append(run(x[0][mx.array(nodes)][:, None], batch))
        states.append(list(batch.cache))

    def state_after(path: Sequence[int]) -> State:
        index = place[path[-1]]
        return [None if array is None else array[index : index + 1] for array in states[len(path)]]

    cache.branch(state_after)
    order = np.argsort([node for nodes in nodes_by_depth for node in nodes])
    return mx.concatenate(outputs)[mx.array(order)].swapaxes(0, 1)
