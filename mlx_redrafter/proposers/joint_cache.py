"""The caches of several sequences for one pass of their network over the rows of all of them.

The matrices of the network see all rows at once. Each sequence attends to its own entries.

Axes: R sequences, n rows of a sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from mlx_redrafter.target.caches.draft_cache import DraftCache, DraftLayer
from mlx_redrafter.target.hooks import Call, TreePositions


class JointLayer(DraftLayer):
    """One layer's caches of several sequences, with the interface that mlx-lm models use.

    Args:
        layers: The layer's cache of each sequence.
        sizes: Number of rows of each sequence in the pass.
    """

    def __init__(self, layers: Sequence[DraftLayer], sizes: Sequence[int]):
        self._layers = layers
        self._sizes = sizes
        self._ends = list(accumulate(sizes))[:-1]
        self._entries: list[tuple[mx.array, mx.array]] = []

    @property
    def offset(self) -> int:
        """Largest number of committed entries; rotary embeddings use `TreePositions` instead."""
        return max(layer.offset for layer in self._layers)

    def make_mask(  # type: ignore[override]
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> list[Any]:
        """Make the mask of each sequence; the network hands them to `attend` as they are."""
        return [
            layer.make_mask(size, return_array, window_size)
            for layer, size in zip(self._layers, self._sizes, strict=True)
        ]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the entries of each sequence; `attend` finds them, and the network none."""
        parts = (mx.split(rows, self._ends, axis=2) for rows in (keys, values))
        self._entries = [
            layer.update_and_fetch(*pair) for layer, *pair in zip(self._layers, *parts, strict=True)
        ]
        return keys, values

    def attend(
        self, call: Call, *arrays: mx.array, scale: float, mask: Any, **options: Any
    ) -> mx.array:
        """Compute attention of each sequence to its own entries."""
        queries = mx.split(arrays[0], self._ends, axis=2)
        parts = zip(self._layers, queries, self._entries, mask, strict=True)
        found = [
            layer.attend(call, own, *entries, scale=scale, mask=one, **options)
            for layer, own, entries, one in parts
        ]
        return mx.concatenate(found, axis=2)


def joint_layers(caches: Sequence[DraftCache], sizes: Sequence[int]) -> list[JointLayer]:
    """Make the network's ``caches`` argument of the caches of several sequences."""
    layers = zip(*(cache.layers for cache in caches), strict=True)
    return [JointLayer(layer, sizes) for layer in layers]


def joint_positions(places: Sequence[TreePositions]) -> TreePositions:
    """Join the positions of the rows of several sequences, each of shape (1, n)."""
    nodes = mx.concatenate([one.nodes for one in places], axis=1)
    return TreePositions(nodes, [span for one in places for span in one.known])
