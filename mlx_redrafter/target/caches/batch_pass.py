"""A forward pass over the trees of several sequences in one buffer per layer.

Axes: B slots, N nodes of each slot's tree, K accepted entries that are not in place, S entries that
a layer attends to.

A buffer is a ring: the entry of position p has the place p modulo the capacity. A layer that
attends to all tokens has room for the longest sequence, so that its entries stay in order. Layers
with a window or chunks have less room and overwrite entries that no token reaches any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.target.caches.tree_pass import History, Move, NewRows, TreePass
from mlx_redrafter.target.hooks import TreePositions
from mlx_redrafter.trees.tree_batch import TreeBatch


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


class BatchPass(TreePass):
    """A forward pass over several trees.

    Attributes:
        trees: The tree of each slot.
        num_nodes: N.
    """

    trees: TreeBatch

    def __init__(
        self,
        lengths: Sequence[int],
        trees: TreeBatch,
        history: History,
        num_rows: int,
        moves: Sequence[Move],
        taken: NewRows | bool,
    ):
        super().__init__(lengths, trees, history, taken)
        self.num_nodes = trees.size
        self._num_rows = num_rows
        self._moves = moves
        self._layouts: dict[int, Layout] = {}

    @cached_property
    def tokens(self) -> mx.array:
        """Token ids of all nodes, with token 0 as padding, int32, shape (B, N)."""
        tokens = self.trees.tokens
        return tokens if self.num_nodes == 1 else mx.maximum(tokens, 0)

    @cached_property
    def starts(self) -> mx.array:
        """Position of each root, int32, shape (B, 1)."""
        return mx.array(self.lengths, dtype=mx.int32)[:, None]

    @cached_property
    def nodes(self) -> mx.array:
        """Position of each node, int32, shape (B, N)."""
        return self.starts if self.num_nodes == 1 else self.starts + self.trees.depths

    @cached_property
    def positions(self) -> TreePositions:
        """Positions of all nodes, for rotary embeddings and others."""
        ends = zip(self.lengths, self.trees.max_depths, strict=True)
        return TreePositions(self.nodes, [range(n, n + depth + 1) for n, depth in ends])

    def layout(self, capacity: int) -> Layout:
        """Return the places of the entries in buffers of this size, and their masks."""
        if capacity not in self._layouts:
            places = Places.of(self._moves, self.lengths, self.num_nodes, capacity)
            self._layouts[capacity] = Layout(self, places, min(self._num_rows, capacity), capacity)
        return self._layouts[capacity]


class Layout:
    """Places of K/V entries in the buffers of some layers, and the masks of these layers.

    Attributes:
        places: Places of the entries that the pass writes.
        num_rows: S.
        longest: Number of committed tokens of the longest sequence.
    """

    def __init__(self, step: BatchPass, places: Places, num_rows: int, capacity: int):
        self.places = places
        self.num_rows = num_rows
        self.longest = max(step.lengths)
        self._step = step
        self._capacity = capacity
        # Whether no entry has been overwritten.
        self._is_whole = self.longest + step.num_nodes <= capacity
        self._masks: dict[tuple[str, int], mx.array] = {}

    @cached_property
    def mask(self) -> mx.array:
        """Mask of all committed tokens and a node's ancestors, bool, shape (B, 1, N, S)."""
        return self._is_seen[:, None]

    def window_mask(self, window: int) -> mx.array:
        """Mask all but the last ``window`` tokens of each node's own path, shape (B, 1, N, S)."""
        return self._near(
            "window", window, lambda: self._positions > self._step.nodes[..., None] - window
        )

    def chunk_mask(self, chunk: int) -> mx.array:
        """Mask all but the tokens of each node's own path since the last multiple of ``chunk``."""
        return self._near(
            "chunk",
            chunk,
            lambda: self._positions // chunk == self._step.nodes[..., None] // chunk,
        )

    def _near(self, kind: str, size: int, is_near: Callable[[], mx.array]) -> mx.array:
        """Return the mask of those entries only, which is made once."""
        if (kind, size) not in self._masks:
            self._masks[kind, size] = (self._is_seen & is_near())[:, None]
        return self._masks[kind, size]

    @cached_property
    def _behind(self) -> mx.array:
        """Distance of each entry behind the root, negative before it, shape (B, S)."""
        places = mx.arange(self.num_rows)
        if self._is_whole:
            return places - self._step.starts
        last = self._step.num_nodes - 1
        return last - (self._step.starts + last - places) % self._capacity

    @cached_property
    def _node(self) -> mx.array:
        """Node of each entry, junk for an entry of no node, shape (B, S)."""
        return mx.clip(self._behind, 0, self._step.num_nodes - 1)

    @cached_property
    def _positions(self) -> mx.array:
        """Position of each entry, junk for an entry of no token, shape (B, 1, S)."""
        before = self._step.starts + mx.minimum(self._behind, 0)
        if self._step.num_nodes > 1:
            depths = mx.take_along_axis(self._step.trees.depths, self._node, axis=1)
            before = mx.where(self._behind > 0, self._step.starts + depths, before)
        return before[:, None]

    @cached_property
    def _is_seen(self) -> mx.array:
        """Whether an entry is committed, or of a node's ancestor or the node, (B, N, S)."""
        behind, num_nodes = self._behind, self._step.num_nodes
        is_there = behind < 1 if num_nodes == 1 else behind < 0
        if not self._is_whole:  # a ring that has come round for some sequences only
            is_there = is_there & (behind >= -self._step.starts)
        if num_nodes == 1:
            return is_there[:, None]
        is_node = (behind >= 0) & (behind < num_nodes)
        shape = len(self._step.lengths), num_nodes, self.num_rows
        nodes = mx.broadcast_to(self._node[:, None], shape)
        is_above = mx.take_along_axis(self._step.trees.ancestors, nodes, axis=2)
        return is_there[:, None] | (is_above & is_node[:, None])
