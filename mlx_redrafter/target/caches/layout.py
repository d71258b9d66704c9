"""Masks of the K/V entries that a pass over trees attends to.

Axes: B sequences, N nodes of each tree, S entries of each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import mlx.core as mx

from mlx_redrafter.trees.tree_batch import TreeBatch


class Layout:
    """Entries of one size of buffers, with the entries of a tree behind the committed ones.

    Args:
        trees: The trees.
        starts: Position of each root, int32, shape (B, 1).
        num_rows: S.
        first: Position of the first entry, an int or an int32 array of shape ().
        capacity: Size of buffers in which new entries have overwritten old ones: the entry of
            position p has the place p modulo the capacity. None if all entries are in order.
        num_before: Number of entries before the root, if it is one for all sequences and the host
            knows it: then the mask takes fewer operations.
    """

    def __init__(
        self,
        trees: TreeBatch,
        starts: mx.array,
        num_rows: int,
        first: int | mx.array = 0,
        capacity: int | None = None,
        num_before: int | None = None,
    ):
        self._trees = trees
        self._starts = starts
        self._num_rows = num_rows
        self._first = first
        self._capacity = capacity
        self._num_before = num_before
        self._masks: dict[tuple[str, int], mx.array] = {}

    @cached_property
    def mask(self) -> mx.array:
        """Mask of all committed tokens and a node's ancestors, bool, shape (B, 1, N, S)."""
        return self._is_seen[:, None]

    def window_mask(self, window: int) -> mx.array:
        """Mask all but the last ``window`` tokens of each node's own path, the node included."""
        return self._near("window", window, lambda: self._positions > self._nodes - window)

    def chunk_mask(self, chunk: int) -> mx.array:
        """Mask all but the tokens of each node's own path since the last multiple of ``chunk``."""
        return self._near("chunk", chunk, lambda: self._positions // chunk == self._nodes // chunk)

    def _near(self, kind: str, size: int, is_near: Callable[[], mx.array]) -> mx.array:
        """Return the mask of those entries only, which is made once."""
        if (kind, size) not in self._masks:
            self._masks[kind, size] = (self._is_seen & is_near())[:, None]
        return self._masks[kind, size]

    @cached_property
    def _nodes(self) -> mx.array:
        """Position of each node, shape (B, N, 1)."""
        return (self._starts + self._trees.depths)[..., None]

    @cached_property
    def _behind(self) -> mx.array:
        """Distance of each entry behind the root, negative before it, shape (B, S)."""
        places = mx.arange(self._num_rows, dtype=mx.int32)
        if self._capacity is None:
            return places - (self._starts - self._first)
        last = self._trees.size - 1
        return last - (self._starts + last - places) % self._capacity

    @cached_property
    def _node(self) -> mx.array:
        """Node of each entry, junk for an entry of no node, shape (B, S)."""
        return mx.clip(self._behind, 0, self._trees.size - 1)

    @cached_property
    def _positions(self) -> mx.array:
        """Position of each entry, junk for an entry of no token, shape (B, 1, S)."""
        before = self._starts + mx.minimum(self._behind, 0)
        if self._trees.size > 1:
            depths = mx.take_along_axis(self._trees.depths, self._node, axis=1)
            before = mx.where(self._behind > 0, self._starts + depths, before)
        return before[:, None]

    @cached_property
    def _is_seen(self) -> mx.array:
        """Whether an entry is committed, or of a node's ancestor or the node, (B, N, S)."""
        num_nodes = self._trees.size
        if self._num_before is not None:
            missing = self._num_rows - self._num_before - num_nodes
            is_there = mx.ones((1, num_nodes, self._num_before), mx.bool_)
            parts = [is_there, self._trees.ancestors, mx.zeros((1, num_nodes, missing), mx.bool_)]
            return mx.concatenate(parts if missing else parts[:2], axis=2)
        behind = self._behind
        is_there = behind < 1 if num_nodes == 1 else behind < 0
        if self._capacity is not None:  # a ring that has come round for some sequences only
            is_there = is_there & (behind >= -self._starts)
        if num_nodes == 1:
            return is_there[:, None]
        is_node = (behind >= 0) & (behind < num_nodes)
        nodes = mx.broadcast_to(self._node[:, None], (behind.shape[0], num_nodes, self._num_rows))
        is_above = mx.take_along_axis(self._trees.ancestors, nodes, axis=2)
        return is_there[:, None] | (is_above & is_node[:, None])
