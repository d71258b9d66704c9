"""A layer that attends to all tokens: mlx-lm's plain buffers, and the rows of one tree beside them.

Axes: N nodes of the tree, S committed tokens.

A gather from a large buffer in the graph that also attends to it makes MLX copy the buffer. So the
rows of a tree are kept aside, and the rows of its accepted path are written together with the next
tree's rows, with one update per buffer; but for those at the beginning of the path that are the
tree's first nodes in order, whose rows are where they belong. Invariants: the buffer holds the
first ``stock.offset`` tokens; where that is not all committed ones, the buffer also holds those up
to ``_num_in_place``, and ``_fresh`` has the rows of the others, those of the nodes ``_aside``.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    create_attention_mask,
)

from mlx_redrafter.target.caches.tree_cache import ForwardPass


class FullCache:
    """The `LayerCache` of full attention, on top of mlx-lm's ``KVCache``."""

    def __init__(self, stock: KVCache | ChunkedKVCache | QuantizedKVCache):
        self.stock = stock
        self._step = ForwardPass(stock.offset)
        self._length = self._num_in_place = stock.offset
        self._aside: list[slice] = []
        self._fresh: tuple[mx.array, mx.array] | None = None

    @property
    def step(self) -> ForwardPass:
        """The forward pass that rows are for."""
        return self._step

    @property
    def offset(self) -> int:
        """Committed tokens before the forward pass."""
        return self._step.length

    def expect(self, step: ForwardPass) -> None:
        """See `LayerCache.expect`."""
        self._step = step
        self._length = step.length

    def commit(self, path: Sequence[int]) -> None:
        """See `LayerCache.commit`."""
        in_place = next((i for i, node in enumerate(path) if node != i), len(path))
        self._num_in_place = self._step.length + in_place
        self._aside = consecutive_runs(path[in_place:])
        self._length = self._step.length + len(path)

    def settle(self, length: int) -> None:
        """See `LayerCache.settle`; a layer that the model never used stays empty."""
        self.write_aside()
        if self.stock.keys is not None:
            self.stock.offset = length
        self._length = length

    def write_aside(self) -> None:
        """Write committed rows that are still aside."""
        keys, values = self._rows_aside()
        if keys:
            self.stock.update_and_fetch(
                mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)
            )

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """What the tokens of the next forward pass may attend to: the tree's mask or mlx-lm's."""
        if self._step.tree is not None:
            if window_size is not None:
                return self._step.window_mask(window_size)
            return self._step.tree_mask
        return create_attention_mask(num_tokens, self._step.length, return_array, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write committed rows that are still aside and these rows; return all of them.

        Args:
            keys: Shape (1, heads, N, head size).
            values: Shape (1, heads, N, value size).

        Returns:
            Keys and values of the S committed tokens and of these N.
        """
        keys_aside, values_aside = self._rows_aside()
        new_keys, new_values = keys, values
        if keys_aside:
            new_keys = mx.concatenate([*keys_aside, keys], axis=2)
            new_values = mx.concatenate([*values_aside, values], axis=2)
        everything = self.stock.update_and_fetch(new_keys, new_values)
        if self._step.tree is not None:
            self.stock.offset -= keys.shape[2]
            self._fresh = (keys, values)
        return everything

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows that the last `update_and_fetch` returned, for layers that share this one's."""
        num_nodes = 0
        if self._step.tree is not None and self._fresh is not None:
            num_nodes = self._fresh[0].shape[2]
        self.stock.offset += num_nodes
        rows = self.stock.keys_and_values()
        self.stock.offset -= num_nodes
        return rows

    def _rows_aside(self) -> tuple[list[mx.array], list[mx.array]]:
        """Committed keys and values that the buffer lacks; what it has counts from now on."""
        if self._fresh is None or self.stock.offset >= self._length:
            return [], []
        self.stock.offset = self._num_in_place
        keys, values = self._fresh
        aside = self._aside
        return [keys[..., run, :] for run in aside], [values[..., run, :] for run in aside]


def reserve_rows(caches: Sequence[KVCache | ChunkedKVCache | QuantizedKVCache], rows: int) -> None:
    """Give caches that hold something buffers of at least ``rows`` rows. Waits for the device."""

    def lengthen(part: mx.array) -> mx.array:
        return mx.pad(part, [(0, 0), (0, 0), (0, max(0, rows - part.shape[2])), (0, 0)])

    for cache in caches:
        assert cache.keys is not None
        assert cache.values is not None
        cache.keys, cache.values = tree_map(lengthen, (cache.keys, cache.values))
        mx.eval(cache.keys, cache.values)


def consecutive_runs(numbers: Sequence[int]) -> list[slice]:
    """Numbers as runs of consecutive ones."""
    found: list[slice] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = slice(found[-1].start, number + 1)
        else:
            found.append(slice(number, number + 1))
    return found
