"""A hook that computes any recurrent layer over a tree, one depth after the other.

The nodes at one depth are a batch of single tokens, each with the state of its parent. Unlike the
hooks in `recurrent_hooks`, this one reads a layer's weights once per depth and keeps the state of
every node until the next pass. It blocks until MLX has computed the drafts if the host does not
know the trees.

Axes: B sequences, N nodes of each tree, H hidden size.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_redrafter.target.caches.recurrent import cache_among
from mlx_redrafter.target.caches.tree_pass import Paths, State
from mlx_redrafter.target.hooks import Call


def follow_depths(call: Call, x: mx.array, *args: Any, **kwargs: Any) -> Any:
    """Hook for a layer with a state whose only input with one row per token is ``x``, (B, N, H)."""
    cache = cache_among(*args, *kwargs.values())
    if cache is None:
        return call(x, *args, **kwargs)

    def run(rows: mx.array, stock: Any) -> mx.array:
        given = [stock if arg is cache else arg for arg in args]
        named = {name: stock if arg is cache else arg for name, arg in kwargs.items()}
        result: mx.array = call(rows, *given, **named)
        return result

    if cache.step.trees is None:
        return run(x, cache.stock)
    step, rows = cache.step, x.flatten(0, 1)
    # Depth of each node, and its place among the nodes of that depth.
    places = {n: (d, i) for d, ns in enumerate(step.nodes_by_depth) for i, n in enumerate(ns)}
    states: list[State] = [list(cache.stock.cache)]
    outputs = []
    for depth, nodes in enumerate(step.nodes_by_depth):
        before = [places[step.parents[node]][1] for node in nodes]
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
    order = np.argsort([node for nodes in step.nodes_by_depth for node in nodes])
    return mx.concatenate(outputs)[mx.array(order)].reshape(*x.shape[:2], -1)
