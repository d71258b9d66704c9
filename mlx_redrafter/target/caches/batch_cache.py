"""The K/V entries of several sequences in one buffer per layer, each sequence at its own offset.

Axes: B slots, N nodes of each slot's tree, S entries that a forward pass attends to, H heads, D
head size.

A slot holds one sequence: its committed entries come first, the entries of its tree follow.
Sequences accept different paths, so nothing is padded or rolled. Each pass writes, at the places of
each sequence, the accepted entries that are not in place yet and the entries of the new tree, with
one update per buffer. No mask lets anything attend to an idle slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_redrafter.target.caches.full import FullCache
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.few_shapes import bucket
from mlx_redrafter.target.hooks import TreePositions
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch

# Number of entries by which buffers grow, as in mlx-lm.
GROWTH = 256
# Further entries of a buffer, for writes that pad slots with fewer entries to move than others.
SCRATCH = 1


class Places(NamedTuple):
    """Places in the buffers for the entries that a pass writes.

    Attributes:
        nodes: Accepted nodes of the newest trees whose entries are not in place, K per slot, shape
            (B, 1, K, 1); None if K is 0.
        rows: Places of these K and of N new entries, shape (B, 1, K + N, 1).
    """

    nodes: mx.array | None
    rows: mx.array


class BatchPass:
    """A forward pass over several trees, with masks that all layers share.

    Attributes:
        trees: The tree of each slot.
        lengths: Number of committed tokens of each slot.
        places: Places of the entries that the pass writes.
        num_nodes: N.
        num_rows: S.
    """

    def __init__(self, trees: TreeBatch, lengths: Sequence[int], places: Places, num_rows: int):
        self.trees = trees
        self.lengths = list(lengths)
        self.places = places
        self.num_nodes = trees.size
        self.num_rows = num_rows

    @cached_property
    def tokens(self) -> mx.array:
        """Token ids of all nodes, with token 0 as padding, int32, shape (B, N)."""
        tokens = self.trees.tokens
        return tokens if self.num_nodes == 1 else mx.maximum(tokens, 0)

    @cached_property
    def starts(self) -> mx.array:
        """Place of each root, int32, shape (B, 1)."""
        return mx.array(self.lengths, dtype=mx.int32)[:, None]

    @cached_property
    def positions(self) -> TreePositions:
        """Positions of all nodes."""
        first = min(self.lengths)
        ends = [n + d for n, d in zip(self.lengths, self.trees.max_depths, strict=True)]
        nodes = self.starts if self.num_nodes == 1 else self.starts + self.trees.depths
        return TreePositions(nodes, first, max(ends) - first + 1)

    @cached_property
    def mask(self) -> mx.array:
        """Mask of all committed tokens and a node's ancestors, bool, shape (B, 1, N, S)."""
        if self.num_nodes == 1:
            return (mx.arange(self.num_rows) <= self.starts)[:, None, None]
        return (self._is_committed | self._is_above)[:, None]

    def window_mask(self, window: int) -> mx.array:
        """Mask all but the last ``window`` tokens of each node's own path, shape (B, 1, N, S)."""
        depths = self.trees.depths[..., None]
        is_near = self._behind > depths - window
        above = mx.take_along_axis(self.trees.depths[:, None], self._nodes, axis=2)
        is_near_node = self._is_above & (depths - above < window)
        return ((self._is_committed & is_near) | is_near_node)[:, None]

    @cached_property
    def _behind(self) -> mx.array:
        """Distance of each entry behind the root, negative before it, shape (B, 1, S)."""
        return (mx.arange(self.num_rows) - self.starts)[:, None]

    @cached_property
    def _is_committed(self) -> mx.array:
        return self._behind < 0

    @cached_property
    def _nodes(self) -> mx.array:
        """Node of each entry, junk for an entry of no node, shape (B, N, S)."""
        shape = len(self.lengths), self.num_nodes, self.num_rows
        return mx.broadcast_to(mx.clip(self._behind, 0, self.num_nodes - 1), shape)

    @cached_property
    def _is_above(self) -> mx.array:
        """Whether an entry belongs to a node's ancestor or the node, shape (B, N, S)."""
        if self.num_nodes == 1:
            return self._behind == 0
        is_node = (self._behind >= 0) & (self._behind < self.num_nodes)
        return mx.take_along_axis(self.trees.ancestors, self._nodes, axis=2) & is_node


class BatchLayer:
    """One layer's entries of all slots, with the interface that mlx-lm models use."""

    def __init__(self, batch: BatchCache):
        self._batch = batch
        # Buffers of keys and values, shape (B, H, capacity + SCRATCH, D).
        self._buffers: list[mx.array] = []
        # Keys and values of the newest trees, shape (B, H, N, D).
        self._fresh: list[mx.array] = []

    @property
    def offset(self) -> int:
        """Length of the longest sequence. Rotary embeddings use `TreePositions` instead."""
        return max(self._batch.lengths)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        step = self._batch.step
        return step.mask if window_size is None else step.window_mask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write accepted entries that are not in place and new entries; return all entries."""
        self.write(self._batch.step.places, [keys, values])
        self._fresh = [keys, values]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all entries that the pass attends to, for layers that share them."""
        keys, values = self._buffers
        num_rows = self._batch.step.num_rows
        return keys[..., :num_rows, :], values[..., :num_rows, :]

    def insert(self, slot: int, stock: KVCache) -> None:
        """Move the entries of a cache into a slot, which has room for them."""
        if stock.keys is None:  # a layer that the model never uses
            return
        parts = stock.keys_and_values()
        self._allocate(parts)
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer[slot : slot + 1, :, : stock.offset] = part
        stock.keys, stock.values, stock.offset = None, None, 0

    def extract(self, slot: int, stock: KVCache, num_rows: int, length: int) -> None:
        """Copy the first entries of a slot, of which ``length`` count, into a cache."""
        if self._buffers:
            keys, values = (
                mx.contiguous(buffer[slot : slot + 1, :, :num_rows]) for buffer in self._buffers
            )
            mx.eval(keys, values)  # else the copies would keep the whole buffer in memory
            stock.keys, stock.values, stock.offset = keys, values, length

    def resize(self, slots: Sequence[int], num_slots: int, capacity: int) -> None:
        """Keep some slots, in this order, and add blank ones, with ``capacity`` entries each."""
        kept = mx.array(list(slots), dtype=mx.int32)
        blank = (0, num_slots - len(slots)), (0, 0)

        def resized(buffer: mx.array) -> mx.array:
            rows = buffer[kept, :, : min(capacity, buffer.shape[2] - SCRATCH)]
            return mx.pad(rows, [*blank, (0, capacity + SCRATCH - rows.shape[2]), (0, 0)])

        self._buffers = list(map(resized, self._buffers))
        self._fresh = [mx.pad(part[kept], [*blank, (0, 0), (0, 0)]) for part in self._fresh]

    def write(self, places: Places, new: Sequence[mx.array]) -> None:
        """Write accepted entries that are not in place, and new keys and values, if any."""
        if new:
            self._allocate(new)
        written = []
        for index, buffer in enumerate(self._buffers):
            rows = [new[index]] if new else []
            if places.nodes is not None:
                rows.insert(0, mx.take_along_axis(self._fresh[index], places.nodes, axis=2))
            written.append(mx.put_along_axis(buffer, places.rows, mx.concatenate(rows, axis=2), 2))
        self._buffers = written

    def _allocate(self, parts: Sequence[mx.array]) -> None:
        """Make buffers of zeros, once, with the heads, sizes and dtypes of keys and values."""
        if not self._buffers:
            num_slots, room = self._batch.num_slots, self._batch.capacity + SCRATCH
            self._buffers = [
                mx.zeros((num_slots, part.shape[1], room, part.shape[3]), part.dtype)
                for part in parts
            ]


class BatchCache:
    """The K/V cache of several sequences.

    Attributes:
        layers: The model's ``cache=`` argument.
        step: The newest forward pass that `expect` has announced.
        lengths: Number of committed tokens of each slot.
        capacity: Number of entries for which a slot has room.
    """

    def __init__(self, num_layers: int, has_buckets: bool = False):
        self._has_buckets = has_buckets
        self.layers = [BatchLayer(self) for _ in range(num_layers)]
        self.lengths: list[int] = []
        self.capacity = 0
        self.step: BatchPass
        # For each slot, the accepted nodes of the newest tree that are not in place, and the place
        # of the first of them.
        self._moves: list[tuple[Sequence[int], int]] = []
        # Size of the newest trees, N.
        self._num_nodes = 0

    @property
    def num_slots(self) -> int:
        """Number of slots, B."""
        return len(self.lengths)

    def expect(self, trees: TreeBatch) -> BatchPass:
        """Make the next forward pass one over these trees, one per slot."""
        self._num_nodes = trees.size
        num_rows = max(self.lengths) + self._num_nodes
        if self._has_buckets:
            num_rows = bucket(num_rows)
        self._reserve(num_rows)
        self.step = BatchPass(trees, self.lengths, self._places(self._num_nodes), num_rows)
        self._moves = [((), 0)] * self.num_slots
        return self.step

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the nodes of ``path``, indices from the root on, of the tree just verified."""
        in_place = next((i for i, node in enumerate(path) if node != i), len(path))
        self._moves[slot] = path[in_place:], self.lengths[slot] + in_place
        self.lengths[slot] += len(path)

    def insert(self, slot: int, stock: Sequence[KVCache]) -> None:
        """Move a sequence from mlx-lm's caches, one per layer, into a slot."""
        self.lengths[slot] = max(layer.offset for layer in stock)
        self._reserve(self.lengths[slot])
        for layer, one in zip(self.layers, stock, strict=True):
            layer.insert(slot, one)

    def leave(self, slot: int, stock: Sequence[KVCache] | None) -> TreeCache:
        """Make a slot idle, and return the cache of its sequence.

        Args:
            slot: The slot.
            stock: mlx-lm's caches, one per layer, into which to copy the entries. The copies
                include, after the committed entries, the root of a tree in flight. None discards
                the entries.
        """
        length = self.lengths[slot]
        if stock is not None:
            self._write_aside()
            num_rows = min(length + 1, self.capacity)
            for layer, one in zip(self.layers, stock, strict=True):
                layer.extract(slot, one, num_rows, length)
        self.lengths[slot], self._moves[slot] = 0, ((), 0)
        return TreeCache([FullCache(one) for one in stock or ()], length)

    def shrink(self, slots: Sequence[int], num_slots: int) -> None:
        """Keep some slots, in this order, and only the room that their sequences need."""
        # The entries of trees that are not accepted yet stand behind the committed ones.
        longest = max((self.lengths[slot] for slot in slots), default=0)
        self.resize(slots, num_slots, longest + self._num_nodes)

    def resize(self, slots: Sequence[int], num_slots: int, num_rows: int) -> None:
        """Keep some slots, in this order, and add idle ones, with ``num_rows`` entries each."""
        self.capacity = -(-num_rows // GROWTH) * GROWTH
        num_idle = num_slots - len(slots)
        self.lengths = [self.lengths[slot] for slot in slots] + [0] * num_idle
        self._moves = [self._moves[slot] for slot in slots] + [((), 0)] * num_idle
        for layer in self.layers:
            layer.resize(slots, num_slots, self.capacity)

    def _reserve(self, num_rows: int) -> None:
        if num_rows > self.capacity:
            self.resize(range(self.num_slots), self.num_slots, num_rows)

    def _write_aside(self) -> None:
        if any(nodes for nodes, _ in self._moves):
            places = self._places(0)
            for layer in self.layers:
                layer.write(places, ())
            self._moves = [((), 0)] * self.num_slots

    def _places(self, num_nodes: int) -> Places:
        """Return the places of accepted entries that are not in place, and of new entries."""
        width = max(len(nodes) for nodes, _ in self._moves)
        nodes, rows = [], []
        for (moved, start), length in zip(self._moves, self.lengths, strict=True):
            missing = width - len(moved)
            nodes.append([*moved, *[0] * missing])
            rows.append(
                [
                    *range(start, start + len(moved)),
                    *[self.capacity] * missing,
                    *range(length, length + num_nodes),
                ]
            )
        moves = mx.array(nodes, dtype=mx.int32)[:, None, :, None] if width else None
        return Places(moves, mx.array(rows, dtype=mx.int32)[:, None, :, None])


class SlotCache:
    """A slot as the cache of its sequence; the batch runs its forward passes.

    ``stock`` are the sequence's own mlx-lm caches, which are empty meanwhile.
    """

    def __init__(self, batch: BatchCache, slot: int, stock: Sequence[KVCache]):
        self._batch = batch
        self.slot = slot
        self.stock = stock

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._batch.lengths[self.slot]

    def commit(self, path: Sequence[int]) -> None:
        self._batch.commit(self.slot, path)

    def takes(self, tree: TokenTree) -> bool:
        """Return True, because every layer attends to all tokens."""
        return True
