"""A layer that attends to a window: mlx-lm's ring, and a buffer in the order of the text for trees.

Axes: N nodes of the tree, W tokens of the window, a token itself among them.

Drafts would overwrite rows of a ring that are still needed where they are rejected. So the first
tree moves its rows into a buffer in the order of the text, which takes the rows of trees as that of
a layer that attends to all tokens does. When the buffer is full, rows that no window reaches any
more are dropped. `SlidingCache.settle` moves the rows back. Until the first tree the ring decodes
alone, as in mlx-lm.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.target.caches.full import FullCache
from mlx_redrafter.target.caches.tree_cache import ForwardPass


class SlidingCache:
    """The `LayerCache` of a sliding window, on top of mlx-lm's ``RotatingKVCache``."""

    def __init__(self, stock: RotatingKVCache):
        self.stock = stock
        self._step = ForwardPass(stock.offset)
        # The rows in the order of the text, from the first tree on.
        self._rows: _OrderedCache | None = None

    @property
    def offset(self) -> int:
        """Committed tokens before the forward pass."""
        return self._step.length

    def expect(self, step: ForwardPass) -> None:
        """See `LayerCache.expect`."""
        self._step = step
        # Here for all layers, as mlx-lm's models ask one of them for the mask of all.
        if self._rows is None and step.tree is not None:
            self._rows = _OrderedCache(_in_order(self.stock))
            self.stock.keys = self.stock.values = None
        if self._rows is not None:
            self._rows.expect(step)

    def commit(self, path: Sequence[int]) -> None:
        """See `LayerCache.commit`."""
        assert self._rows is not None
        self._rows.commit(path)

    def settle(self, length: int) -> None:
        """See `LayerCache.settle`; rows that are not there any more become zeros."""
        if self._rows is not None:
            self._rows.settle(length)
            _fill(self.stock, self._rows.stock, length)
            self._rows = None
        elif self.stock.offset != length:
            _fill(self.stock, _in_order(self.stock), length)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """What the tokens of the next forward pass may attend to: the tree's mask or mlx-lm's."""
        if self._rows is None:
            return self.stock.make_mask(num_tokens, window_size, return_array)
        if self._step.tree is None:
            return None
        return self._step.window_mask(self.stock.max_size, self._first)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write rows, see `FullCache.update_and_fetch`; return those that one of them sees."""
        if self._rows is None:
            return self.stock.update_and_fetch(keys, values)
        self._rows.update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows that the last `update_and_fetch` returned, for layers that share this one's."""
        if self._rows is None:
            return self.stock.keys_and_values()
        keys, values = self._rows.keys_and_values()
        first = self._first - self._rows.stock.start_position
        return keys[..., first:, :], values[..., first:, :]

    @property
    def _first(self) -> int:
        """Position of the first token that the next one sees."""
        return max(0, self._step.length + 1 - self.stock.max_size)


class _OrderedRows(ChunkedKVCache):
    """Rows of the last tokens in the order of the text.

    ``chunk_size`` of them are kept when the buffer is full, so that it is copied once in a while.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows; return all of them."""
        num_rows = self.offset - self.start_position + keys.shape[2]
        if self.keys is not None and num_rows > self.keys.shape[2]:
            self.maybe_trim_front()
        return super().update_and_fetch(keys, values)


class _OrderedCache(FullCache):
    """The `LayerCache` of such rows."""

    stock: _OrderedRows


def _in_order(ring: RotatingKVCache) -> _OrderedRows:
    """The rows of a ring in the order of the text."""
    # A text may end anywhere in the path accepted before the newest tree.
    rows = _OrderedRows(ring.max_size + MAX_BEAM_LENGTH)
    rows.offset = rows.start_position = ring.offset
    if ring.keys is not None:
        rows.keys = ring._temporal_order(ring.keys)
        rows.values = ring._temporal_order(ring.values)
        rows.start_position -= rows.keys.shape[2]
    return rows


def _fill(ring: RotatingKVCache, rows: _OrderedRows, length: int) -> None:
    """Leave a ring holding the first ``length`` tokens; one that has no rows stays empty."""
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
