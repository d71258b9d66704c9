"""Rows of several texts in one buffer per layer, each text at its own offset.

Axes: B slots, N nodes of each slot's tree, S rows that a forward pass sees, H heads, D head size.

A slot holds one text: its committed rows are the first ones of the slot, and the rows of its tree
follow them. Texts accept different paths, so nothing is padded or rolled: what each of them has to
write, accepted rows that are not in place and the rows of the next tree, goes to places of its own,
with one update per buffer. What an idle slot holds is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_redrafter.target.caches.full import FullCache
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.hooks import TreePositions
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch

# Rows by which buffers grow, as mlx-lm's do, and one more for what is written for slots that have
# fewer rows to write than others.
ROWS_STEP, SCRATCH = 256, 1


class Places(NamedTuple):
    """Places of rows that are written.

    Attributes:
        nodes: Nodes of the newest trees whose rows are accepted and not in place, K of each slot,
            shape (B, 1, K, 1); None where there are none.
        rows: Places of those and of N new ones, shape (B, 1, K + N, 1).
    """

    nodes: mx.array | None
    rows: mx.array


class BatchPass:
    """What a forward pass over several trees processes, the same for all layers.

    Attributes:
        forest: The tree of each slot, all of N nodes.
        lengths: Committed tokens of each slot.
        places: Places of the rows that it writes.
        num_nodes: N.
        num_rows: S.
    """

    def __init__(self, forest: TreeBatch, lengths: Sequence[int], places: Places):
        self.forest = forest
        self.lengths = list(lengths)
        self.places = places
        self.num_nodes = forest.size
        self.num_rows = max(lengths) + self.num_nodes

    @cached_property
    def tokens(self) -> mx.array:
        """Token ids of all nodes, padding as token 0, int32, shape (B, N)."""
        tokens = self.forest.tokens
        return tokens if self.num_nodes == 1 else mx.maximum(tokens, 0)

    @cached_property
    def starts(self) -> mx.array:
        """Row of each root, int32, shape (B, 1)."""
        return mx.array(self.lengths, dtype=mx.int32)[:, None]

    @cached_property
    def positions(self) -> TreePositions:
        """Positions of all nodes."""
        first = min(self.lengths)
        ends = [n + d for n, d in zip(self.lengths, self.forest.max_depths, strict=True)]
        nodes = self.starts if self.num_nodes == 1 else self.starts + self.forest.depths
        return TreePositions(nodes, first, max(ends) - first + 1)

    @cached_property
    def mask(self) -> mx.array:
        """Nodes seeing all committed tokens and their ancestors, bool, shape (B, 1, N, S)."""
        if self.num_nodes == 1:
            return (mx.arange(self.num_rows) <= self.starts)[:, None, None]
        return (self._is_committed | self._is_above)[:, None]

    def window_mask(self, window: int) -> mx.array:
        """Nodes seeing the last ``window`` tokens of their own text, of the same shape."""
        depths = self.forest.depths[..., None]
        is_near = self._behind > depths - window
        above = mx.take_along_axis(self.forest.depths[:, None], self._nodes, axis=2)
        is_near_node = self._is_above & (depths - above < window)
        return ((self._is_committed & is_near) | is_near_node)[:, None]

    @cached_property
    def _behind(self) -> mx.array:
        """How far each row stands behind a root, negative before it, shape (B, 1, S)."""
        return (mx.arange(self.num_rows) - self.starts)[:, None]

    @cached_property
    def _is_committed(self) -> mx.array:
        return self._behind < 0

    @cached_property
    def _nodes(self) -> mx.array:
        """The node whose row each is, junk where it is none, shape (B, N, S)."""
        shape = len(self.lengths), self.num_nodes, self.num_rows
        return mx.broadcast_to(mx.clip(self._behind, 0, self.num_nodes - 1), shape)

    @cached_property
    def _is_above(self) -> mx.array:
        """Whether a row is that of a node's ancestor, or its own, shape (B, N, S)."""
        if self.num_nodes == 1:
            return self._behind == 0
        is_node = (self._behind >= 0) & (self._behind < self.num_nodes)
        return mx.take_along_axis(self.forest.ancestors, self._nodes, axis=2) & is_node


class BatchLayer:
    """One layer's rows of all slots, with the interface that mlx-lm models use."""

    def __init__(self, batch: BatchCache):
        self._batch = batch
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        # Rows of the newest trees, shape (B, H, N, D).
        self._fresh: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> int:
        """Committed tokens of the longest text; positions are those of `TreePositions`."""
        return max(self._batch.lengths)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """What the nodes of the next forward pass may attend to."""
        step = self._batch.step
        return step.mask if window_size is None else step.window_mask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write accepted rows that are not in place and these rows; return all of them.

        Args:
            keys: Shape (B, H, N, D).
            values: Shape (B, H, N, value size).
        """
        self.write(self._batch.step.places, (keys, values))
        self._fresh = keys, values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows that the pass sees, for layers that share this one's."""
        assert self._keys is not None
        assert self._values is not None
        num_rows = self._batch.step.num_rows
        return self._keys[..., :num_rows, :], self._values[..., :num_rows, :]

    def insert(self, slot: int, stock: KVCache) -> None:
        """Move the rows of a cache into a slot; the buffers have room for them."""
        if stock.keys is None:  # a layer that the model never uses
            return
        stock_rows = stock.keys_and_values()
        if self._rows is None:
            self._keys, self._values = map(self._blank, stock_rows)
        for buffer, part in zip(self._rows or (), stock_rows, strict=True):
            buffer[slot : slot + 1, :, : stock.offset] = part
        stock.keys, stock.values, stock.offset = None, None, 0

    def extract(self, slot: int, stock: KVCache, num_rows: int, length: int) -> None:
        """Let a cache hold copies of the first rows of a slot, of which ``length`` count."""
        rows = self._rows
        if rows is not None:
            keys, values = (mx.contiguous(part[slot : slot + 1, :, :num_rows]) for part in rows)
            mx.eval(keys, values)  # else it would keep all of the buffer
            stock.keys, stock.values, stock.offset = keys, values, length

    def resize(self, slots: Sequence[int], num_slots: int, capacity: int) -> None:
        """Keep some slots, in this order, and add blank ones, with room for ``capacity`` rows."""
        kept = mx.array(list(slots), dtype=mx.int32)
        blank = (0, num_slots - len(slots)), (0, 0)

        def resized(part: mx.array) -> mx.array:
            rows = part[kept, :, : min(capacity, part.shape[2] - SCRATCH)]
            return mx.pad(rows, [*blank, (0, capacity + SCRATCH - rows.shape[2]), (0, 0)])

        if self._rows is not None:
            self._keys, self._values = map(resized, self._rows)
        if self._fresh is not None:
            keys, values = (mx.pad(part[kept], [*blank, (0, 0), (0, 0)]) for part in self._fresh)
            self._fresh = keys, values

    def write(self, places: Places, new: tuple[mx.array, mx.array] | None) -> None:
        """Write accepted rows that are not in place, and new ones, shape (B, H, N, D)."""
        if self._rows is None:
            assert new is not None
            self._keys, self._values = map(self._blank, new)
        written = []
        for index, buffer in enumerate(self._rows or ()):
            rows = [] if new is None else [new[index]]
            if places.nodes is not None:
                assert self._fresh is not None
                rows.insert(0, mx.take_along_axis(self._fresh[index], places.nodes, axis=2))
            written.append(mx.put_along_axis(buffer, places.rows, mx.concatenate(rows, axis=2), 2))
        self._keys, self._values = written

    @property
    def _rows(self) -> tuple[mx.array, mx.array] | None:
        if self._keys is None or self._values is None:
            return None
        return self._keys, self._values

    def _blank(self, part: mx.array) -> mx.array:
        """Zeros for all slots; rows have the heads, size and dtype of these."""
        _, heads, _, size = part.shape
        shape = self._batch.num_slots, heads, self._batch.capacity + SCRATCH, size
        return mx.zeros(shape, part.dtype)


class BatchCache:
    """The rows of several texts.

    Attributes:
        layers: The model's ``cache=`` argument.
        step: The next forward pass, or the newest one.
        lengths: Committed tokens of each slot.
        capacity: Rows that a slot has room for.
    """

    def __init__(self, num_layers: int):
        self.layers = [BatchLayer(self) for _ in range(num_layers)]
        self.lengths: list[int] = []
        self.capacity = 0
        self.step: BatchPass
        # For each slot, the accepted nodes of the newest tree that are not in place, and the row
        # where they begin.
        self._moves: list[tuple[Sequence[int], int]] = []
        # Nodes of the newest trees.
        self._num_nodes = 0

    @property
    def num_slots(self) -> int:
        """Number of slots, B."""
        return len(self.lengths)

    def expect(self, forest: TreeBatch) -> BatchPass:
        """Make the next forward pass one over these trees, one per slot."""
        self._num_nodes = forest.size
        longest = max(self.lengths) + self._num_nodes
        if longest > self.capacity:
            self.resize(range(self.num_slots), self.num_slots, longest)
        self.step = BatchPass(forest, self.lengths, self._places(self._num_nodes))
        self._moves = [((), 0)] * self.num_slots
        return self.step

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the nodes of ``path``, indices from the root on, of the tree just verified."""
        in_place = next((i for i, node in enumerate(path) if node != i), len(path))
        self._moves[slot] = path[in_place:], self.lengths[slot] + in_place
        self.lengths[slot] += len(path)

    def insert(self, slot: int, stock: Sequence[KVCache]) -> None:
        """Let a slot hold the text of mlx-lm's caches, one per layer."""
        self.lengths[slot] = max(layer.offset for layer in stock)
        if self.lengths[slot] > self.capacity:
            self.resize(range(self.num_slots), self.num_slots, self.lengths[slot])
        for layer, one in zip(self.layers, stock, strict=True):
            layer.insert(slot, one)

    def leave(self, slot: int, stock: Sequence[KVCache] | None) -> TreeCache:
        """Make a slot idle, and return its text's own caches.

        Args:
            slot: The slot.
            stock: mlx-lm's caches, one per layer, which get copies of its rows, that of the root
                of a tree in flight among them, beyond the committed ones; None where nobody wants
                those.
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
        """Keep some slots, in this order, among ``num_slots``, with room for what they hold."""
        # The rows of trees that are not accepted yet stand behind the committed ones.
        longest = max((self.lengths[slot] for slot in slots), default=0)
        self.resize(slots, num_slots, longest + self._num_nodes)

    def resize(self, slots: Sequence[int], num_slots: int, num_rows: int) -> None:
        """Keep some slots, in this order, and add idle ones, with room for so many rows."""
        self.capacity = -(-num_rows // ROWS_STEP) * ROWS_STEP
        num_idle = num_slots - len(slots)
        self.lengths = [self.lengths[slot] for slot in slots] + [0] * num_idle
        self._moves = [self._moves[slot] for slot in slots] + [((), 0)] * num_idle
        for layer in self.layers:
            layer.resize(slots, num_slots, self.capacity)

    def _write_aside(self) -> None:
        if any(nodes for nodes, _ in self._moves):
            places = self._places(0)
            for layer in self.layers:
                layer.write(places, None)
            self._moves = [((), 0)] * self.num_slots

    def _places(self, num_nodes: int) -> Places:
        """Places of accepted rows that are not in place yet, and of new ones."""
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
    """A slot as the cache of its sequence; its forward passes are those of the batch.

    Attributes:
        slot: Number of the slot.
        stock: The sequence's own mlx-lm caches, which are empty meanwhile.
    """

    def __init__(self, batch: BatchCache, slot: int, stock: Sequence[KVCache]):
        self._batch = batch
        self.slot = slot
        self.stock = stock

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._batch.lengths[self.slot]

    def commit(self, path: Sequence[int]) -> None:
        """Keep the nodes of ``path``, indices from the root on, of the tree just verified."""
        self._batch.commit(self.slot, path)

    def takes(self, tree: TokenTree) -> bool:
        """True, as every layer attends to all tokens."""
        return True
