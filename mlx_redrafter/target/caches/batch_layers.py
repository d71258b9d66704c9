"""K/V entries of several sequences: one class per kind of attention, with mlx-lm's interface.

Axes: B slots, N nodes of each slot's tree, S entries that a layer attends to, H heads, D head size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.target.caches.full import ChunkCache, Entries, FullCache, arrays_of, pair_of
from mlx_redrafter.target.caches.quantised import QuantisedCache
from mlx_redrafter.target.caches.sliding import SlidingCache
from mlx_redrafter.target.caches.tree_pass import Move, Places, TreePass

# Number of entries by which buffers grow, as in mlx-lm.
GROWTH = 256
# Further entries of a buffer, for writes that pad slots with fewer entries to move than others.
SCRATCH = 1
# Maximum number of passes in which a sequence may have to end. Its caller may be taking the tokens
# of two of them while those of two others wait in the scheduler.
MAX_OPEN = 4
# Maximum number of tokens by which it may have to be shortened: as many accepted paths.
SPARE = MAX_OPEN * MAX_BEAM_LENGTH


class BatchLayer:
    """One layer's entries of all slots; a token attends to ``reach`` tokens, or to all (None)."""

    def __init__(self, reach: int | None = None):
        self._reach = reach
        # Number of entries of a slot in the buffers.
        self._capacity = 0
        # Buffers of keys, values and what belongs to them, shape (B, H, capacity + SCRATCH, D).
        self._buffers: list[mx.array] = []
        # The same of the newest trees, shape (B, H, N, D).
        self._fresh: list[mx.array] = []
        self._step: TreePass

    @property
    def offset(self) -> int:
        """Length of the longest sequence. Rotary embeddings use `TreePositions` instead."""
        return self._step.length

    def expect(self, step: TreePass) -> None:
        self._step = step

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        return self._step.layout(0, self._capacity).window_mask(self._reach or window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write accepted entries that are not in place and new entries; return all entries."""
        new = self._encoded(keys, values)
        self._allocate(new, keys.shape[0])
        self._write(self._step.places(self._capacity), new)
        self._fresh = new
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return all entries that the pass attends to, for layers that share them."""
        num_rows = min(self._step.num_rows(), self._capacity)
        return pair_of([buffer[..., :num_rows, :] for buffer in self._buffers])

    def insert(self, slot: int, num_slots: int, entries: Entries, length: int) -> None:
        """Write the entries of a sequence of ``length`` tokens to a slot, which is blank."""
        self._allocate(entries.parts, num_slots)
        capacity = self._capacity
        for buffer, part in zip(self._buffers, entries.parts, strict=False):
            rows = part[..., -capacity:, :]
            start = (length - rows.shape[2]) % capacity
            before = rows[..., : capacity - start, :]
            buffer[slot : slot + 1, :, start : start + before.shape[2]] = before
            if around := rows.shape[2] - before.shape[2]:
                buffer[slot : slot + 1, :, :around] = rows[..., -around:, :]

    def blank(self, slot: int) -> None:
        """Remove what a slot holds: no mask would hide a NaN in it from the next sequence."""
        for buffer in self._buffers:
            buffer[slot] = mx.zeros((), buffer.dtype)

    def extract(self, slot: int, length: int) -> Entries:
        """Copy the entries of a slot with ``length`` tokens, and that of a tree's root behind them.

        A sequence may end in the newest paths, so that a window needs some tokens before its own.
        """
        start = 0 if self._reach is None else max(0, length - self._reach - SPARE)
        end = min(length + 1, start + self._capacity)
        parts = []
        for buffer in self._buffers:
            rows = buffer[slot : slot + 1, :, : self._capacity]
            if shift := start % self._capacity:
                rows = mx.roll(rows, -shift, 2)
            parts.append(mx.contiguous(rows[..., : end - start, :]))
        mx.eval(parts)  # else the copies would keep the whole buffer in memory
        return Entries(parts, start)

    def resize(
        self, slots: mx.array, num_blank: int, ends: Sequence[int], capacity: int, max_nodes: int
    ) -> None:
        """Keep some slots, int32, in this order, and add blank ones.

        ``ends`` are the positions behind the last entries of the kept slots. ``capacity`` is the
        number of entries that a slot needs if all tokens are attended to.
        """
        if self._reach is not None:
            capacity = min(capacity, whole(self._reach + SPARE + max_nodes))
        old, self._capacity, blank = self._capacity, capacity, (0, num_blank)

        def resized(buffer: mx.array) -> mx.array:
            rows = buffer[slots, :, : min(capacity, old)]
            if old < capacity and max(ends, default=0) > old:
                rows = _moved(buffer[slots, :, :old], ends, capacity)
            missing = capacity + SCRATCH - rows.shape[2]
            return mx.pad(rows, [blank, (0, 0), (0, missing), (0, 0)])

        self._buffers = list(map(resized, self._buffers))
        self._fresh = [mx.pad(part[slots], [blank, *[(0, 0)] * 3]) for part in self._fresh]

    def write_aside(self, moves: Sequence[Move]) -> None:
        """Write the accepted entries of the newest trees that are not in place."""
        if self._fresh:
            self._write(Places.of(moves, [0] * len(moves), 0, self._capacity), [])

    def _write(self, places: Places, new: Sequence[mx.array]) -> None:
        """Write accepted entries that are not in place, and new ones, if any."""
        for index, buffer in enumerate(self._buffers):
            rows = [new[index]] if new else []
            if places.nodes is not None:
                rows.insert(0, mx.take_along_axis(self._fresh[index], places.nodes, axis=2))
            joined = mx.concatenate(rows, axis=2) if len(rows) > 1 else rows[0]
            self._buffers[index] = mx.put_along_axis(buffer, places.rows, joined, axis=2)

    def _allocate(self, parts: Sequence[mx.array], num_slots: int) -> None:
        """Make buffers of zeros, once, with the heads, sizes and dtypes of some entries."""
        if not self._buffers:
            room = self._capacity + SCRATCH
            self._buffers = [
                mx.zeros((num_slots, part.shape[1], room, part.shape[3]), part.dtype)
                for part in parts
            ]

    def _encoded(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Return the arrays of which the buffers hold rows."""
        return [keys, values]


class BatchChunkLayer(BatchLayer):
    """Entries of a layer that attends to its own chunk."""

    @property
    def start_position(self) -> int:
        """Position of the first entry. Models make a mask from it, which a hook replaces."""
        return self.offset

    def maybe_trim_front(self) -> None:
        """Drop nothing: new entries overwrite those that no token reaches."""

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        assert self._reach is not None
        return self._step.layout(0, self._capacity).chunk_mask(self._reach)


class BatchQuantisedLayer(BatchLayer):
    """Quantised entries of a layer that attends to all tokens."""

    def __init__(self, bits: int, group_size: int):
        super().__init__()
        self.bits, self.group_size = bits, group_size

    def _encoded(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        codes = [mx.quantize(x, group_size=self.group_size, bits=self.bits) for x in (keys, values)]
        return arrays_of(*codes)


# Constructors by kind of a single sequence's cache.
BATCH_LAYERS: Mapping[type, Callable[[Any], BatchLayer]] = {
    FullCache: lambda own: BatchLayer(),
    SlidingCache: lambda own: BatchLayer(own.stock.max_size),
    ChunkCache: lambda own: BatchChunkLayer(own.stock.chunk_size),
    QuantisedCache: lambda own: BatchQuantisedLayer(own.bits, own.group_size),
}


def whole(num_entries: int) -> int:
    """Round up to the steps by which buffers grow."""
    return -(-num_entries // GROWTH) * GROWTH


def _moved(rows: mx.array, ends: Sequence[int], capacity: int) -> mx.array:
    """Move the newest entries of rings, shape (B, H, old capacity, D), to rings of another size.

    ``ends`` are the positions behind the last entries.
    """
    old = rows.shape[2]
    last = mx.array(list(ends), dtype=mx.int32)[:, None] - 1
    position = last - (last - mx.arange(capacity)) % capacity
    found = mx.take_along_axis(rows, (position % old)[:, None, :, None], axis=2)
    is_there = (position >= 0) & (position > last - old)
    return mx.where(is_there[:, None, :, None], found, mx.zeros((), rows.dtype))
