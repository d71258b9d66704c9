"""A hook that takes recurrent layers along a tree level by level, whatever their recurrence.

All nodes at one depth are a batch of single tokens, each on the state of its parent. Compared with
the matrix of ancestors, a layer's weights are read once per level, the state of every node is held
until the next tree, and where the host does not know the tree yet it waits for the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_redrafter.target.caches.recurrent import RecurrentCache, State
from mlx_redrafter.target.hooks import Call


def follow_levels(call: Call, x: mx.array, *args: Any, **kwargs: Any) -> Any:
    """Hook for a layer with a state that takes rows, its cache, and nothing else that has rows.

    Args:
        call: The layer.
        x: Rows of the N nodes, shape (1, N, H).
        *args: Arguments that are the same for all rows, among them the layer's cache.
        **kwargs: The same by name.

    Returns:
        Shape (1, N, H).
    """
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
    levels, parents = cache.step.levels, cache.step.parents
    place = {node: index for level in levels for index, node in enumerate(level)}
    states: list[State] = [list(cache.stock.cache)]
    outputs = []
    for depth, level in enumerate(levels):
        above = mx.array([place[parents[node]] if depth else 0 for node in level])
        batch = ArraysCache(len(states[0]))
        for index, array in enumerate(states[depth]):
            batch[index] = None if array is None else array[above]
        outputs.append(run(x[0][mx.array(level)][:, None], batch))
        states.append(list(batch.cache))

    def state_after(path: Sequence[int]) -> State:
        index = place[path[-1]]
        return [None if array is None else array[index : index + 1] for array in states[len(path)]]

    cache.branch(state_after)
    order = np.argsort([node for level in levels for node in level])
    return mx.concatenate(outputs)[mx.array(order)].swapaxes(0, 1)
