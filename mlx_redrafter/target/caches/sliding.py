"""A layer that attends to a window: mlx-lm's ring, and for trees a buffer in the order of tokens.

Axes: N nodes of the tree, W tokens of a window, which includes the newest token.

Drafts would overwrite entries of the ring that are still needed if the target rejects the drafts.
So the first tree moves the K/V entries into a buffer in the order of tokens, which works as in
`full`. A full buffer drops the entries that no window reaches any more. `trim_to` moves the entries
back. Before the first tree the layer uses the ring alone, as in mlx-lm.
"""

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.target.caches.full import Entries, FullCache
from mlx_redrafter.target.caches.tree_pass import TreePass


class SlidingCache(FullCache):
    """The `LayerCache` of a sliding window, on top of mlx-lm's ``RotatingKVCache``."""

    stock: RotatingKVCache

    @property
    def _is_ordered(self) -> bool:
        return self._rows is not self.stock

    def expect(self, step: TreePass) -> None:
        # Before any layer runs, because mlx-lm's models ask one layer for the mask of all.
        if step.trees is not None:
            self._put_in_order()
        end = step.length + (1 if step.trees is None else step.trees.size)
        if self._is_ordered and not self.has_room(end):
            self.write_aside()
            self._rows.maybe_trim_front()
        super().expect(step)

    def trim_to(self, length: int) -> None:
        """Fill the ring again; entries that the buffer has dropped become zeros."""
        if self._is_ordered or self.stock.offset != length:
            self._put_in_order()
            super().trim_to(length)
            _fill(self.stock, self._rows, length)
            self._rows = self.stock

    def release(self) -> Entries:
        self._put_in_order()
        self.stock.offset = self.stock._idx = 0
        entries = super().release()
        self._rows = self.stock
        return entries

    def hold(self, entries: Entries, length: int) -> None:
        self._rows = _rows_for(self.stock)
        super().hold(entries, length)

    def _put_in_order(self) -> None:
        """Move the entries of the ring into a buffer in the order of tokens, if they are in it."""
        if not self._is_ordered:
            self._rows = _in_order(self.stock)
            self.stock.keys = self.stock.values = None
            self._begin()

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if not self._is_ordered:
            return self.stock.make_mask(num_tokens, window_size, return_array)
        if self.step.trees is None:
            return None
        return self.step.layout(self._first).window_mask(self.stock.max_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write entries as `FullCache.update_and_fetch` does; return those in some window."""
        if not self._is_ordered:
            return self.stock.update_and_fetch(keys, values)
        super().update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        if not self._is_ordered:
            return self.stock.keys_and_values()
        keys, values = super().keys_and_values()
        first = self._first - self.start
        return (keys, values) if first == 0 else (keys[..., first:, :], values[..., first:, :])

    @property
    def _first(self) -> int:
        """Position of the first token that the pass attends to.

        With buckets the whole buffer, so that its part has the same shape in every step. Otherwise
        the window of the next token.
        """
        if self.step.trees is not None and self.step.has_buckets:
            return self.start
        return max(0, self.step.length + 1 - self.stock.max_size)

    def has_room(self, end: int) -> bool:
        """Return whether the buffer holds, or grows for, all entries up to position ``end``.

        Else `expect` drops those that no window reaches. ``chunk_size`` entries stay, so MLX copies
        the buffer only now and then.
        """
        rows = self._rows
        if not self._is_ordered:
            return False
        num_rows = 0 if rows.keys is None else rows.keys.shape[2]
        return end - rows.start_position <= max(num_rows, rows.chunk_size)


def _in_order(ring: RotatingKVCache) -> ChunkedKVCache:
    """Copy the entries of a ring in the order of tokens."""
    rows = _rows_for(ring)
    rows.offset = rows.start_position = ring.offset
    if ring.keys is not None:
        rows.keys = ring._temporal_order(ring.keys)
        rows.values = ring._temporal_order(ring.values)
        rows.start_position -= rows.keys.shape[2]
    return rows


def _rows_for(ring: RotatingKVCache) -> ChunkedKVCache:
    """Make a buffer for the entries of a ring and of the path accepted before the newest tree.

    A sequence may end anywhere in that path.
    """
    return ChunkedKVCache(ring.max_size + MAX_BEAM_LENGTH)


def _fill(ring: RotatingKVCache, rows: ChunkedKVCache, length: int) -> None:
    """Leave a ring holding the first ``length`` tokens; an unused ring stays empty."""
    if rows.keys is None or rows.values is None:
        return
    size = min(length, ring.max_size)
    end = length - rows.start_position
    kept = slice(max(0, end - size), max(0, end))
    ring.keys, ring.values = (
        mx.pad(x[..., kept, :], [(0, 0), (0, 0), (size - x[..., kept, :].shape[2], 0), (0, 0)])
        for x in (rows.keys, rows.values)
    )
    ring.offset, ring._idx = length, size
