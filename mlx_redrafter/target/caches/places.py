"""Places of the K/V entries of several sequences in one buffer per layer.

Axes: B slots, N nodes of each slot's tree, K accepted entries that are not in place.

A buffer is a ring: the entry of position p has the place p modulo the capacity. A layer that
attends to all tokens has room for the longest sequence, so that its entries stay in order. Layers
with a window or chunks have less room and overwrite entries that no token reaches any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

# Accepted nodes of a tree whose K/V entries are not in place, and the position of the first.
Move = tuple[Sequence[int], int]


class Places(NamedTuple):
    """Places in the buffers for the entries that a pass writes.

    Attributes:
        nodes: Accepted nodes of the newest trees whose entries are not in place, K per slot, shape
            (B, 1, K, 1); None if K is 0.
        rows: Places of these K and of N new entries, shape (B, 1, K + N, 1).
    """

    nodes: mx.array | None
    rows: mx.array

    @classmethod
    def of(
        cls, moves: Sequence[Move], lengths: Sequence[int], num_nodes: int, capacity: int
    ) -> Places:
        """Find the places of accepted entries and of the entries of new trees.

        Slots with fewer entries to move than others write the place behind the last one.
        """
        width = max(len(nodes) for nodes, _ in moves)
        nodes, rows = [], []
        for (moved, start), length in zip(moves, lengths, strict=True):
            missing = width - len(moved)
            nodes.append([*moved, *[0] * missing])
            positions = *range(start, start + len(moved)), *range(length, length + num_nodes)
            places = [position % capacity for position in positions]
            rows.append([*places[: len(moved)], *[capacity] * missing, *places[len(moved) :]])
        shape = len(rows), 1, -1, 1
        moved_nodes = mx.array(nodes, dtype=mx.int32).reshape(shape) if width else None
        return cls(moved_nodes, mx.array(rows, dtype=mx.int32).reshape(shape))
