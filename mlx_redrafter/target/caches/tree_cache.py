"""The K/V cache while trees are decoded: stock buffers, and the rows of one tree beside them.

Axes: N nodes of the tree, S committed tokens, L beam length.

A gather from a large buffer in the graph that also attends to it makes MLX copy the buffer. So the
rows of a tree are kept aside, and the rows of its accepted path are written together with the next
tree's rows, with one update per buffer; but for those at the beginning of the path that are the
tree's first nodes in order, whose rows are where they belong. Invariants, per layer: the buffer
holds the first ``stock.offset`` tokens; ``TreeCache.length`` counts the committed tokens; where the
two differ, the buffer holds the first ``TreeCache.num_in_place`` of them, and ``fresh`` has the
rows of the others, those of the nodes ``TreeCache.aside``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from mlx_redrafter.errors import UnsupportedTargetError


class TreeCache:
    """All layers' K/V rows: those of the committed tokens, and those of the tree being verified.

    ``layers`` is what the model takes as its cache. The buffers are the ones of the stock caches
    given, which `settle` leaves as plain decoding would.
    """

    def __init__(self, stock: Sequence[KVCache]):
        self.stock = list(stock)
        # A cycle would keep the buffers of a finished request until Python looks for cycles.
        self.layers = [LayerCache(cache, weakref.proxy(self)) for cache in self.stock]
        self.length = max(cache.offset for cache in self.stock)
        self.num_in_place = self.length
        self.aside: list[slice] = []
        self.mask: mx.array | None = None

    def expect_token(self) -> None:
        """Make the next forward pass a plain one, over committed tokens."""
        self.mask = None

    def expect_tree(self, ancestors: mx.array) -> None:
        """Make the next forward pass one over a tree with this ancestor mask, shape (N, N)."""
        committed = mx.ones((ancestors.shape[0], self.length), dtype=mx.bool_)
        self.mask = mx.concatenate([committed, ancestors], axis=1)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows of ``path``, node indices from the root on, of the tree just verified."""
        in_place = next((i for i, node in enumerate(path) if node != i), len(path))
        self.num_in_place = self.length + in_place
        self.aside = consecutive_runs(path[in_place:])
        self.length += len(path)

    def settle(self, length: int) -> None:
        """Leave the stock caches holding exactly the first ``length`` tokens.

        The row of the newest tree's root counts as one that is there. Safe after an interruption.
        """
        for layer in self.layers:
            layer.write_committed()
            if layer.stock.keys is not None:
                layer.stock.offset = length
        self.length = length


def reserve_rows(caches: Sequence[KVCache], rows: int) -> None:
    """Give caches that hold something buffers of at least ``rows`` rows. Waits for the device."""
    for cache in caches:
        assert cache.keys is not None
        assert cache.values is not None
        missing = [(0, 0), (0, 0), (0, max(0, rows - cache.keys.shape[2])), (0, 0)]
        cache.keys, cache.values = mx.pad(cache.keys, missing), mx.pad(cache.values, missing)
        mx.eval(cache.keys, cache.values)


class LayerCache:
    """One layer's part of a `TreeCache`, with the interface that mlx-lm models use."""

    def __init__(self, stock: KVCache, shared: TreeCache):
        self.stock = stock
        self.shared = shared
        self.fresh: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> int:
        """Committed tokens."""
        return self.shared.length

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """What the tokens of the next forward pass may attend to: the tree's mask or mlx-lm's."""
        if self.shared.mask is not None:
            if window_size is not None:
                raise UnsupportedTargetError(
                    f"expected layers that attend to all tokens, found a window of {window_size}; "
                    "a tree cannot be decoded exactly with it, use mlx_lm.generate"
                )
            return self.shared.mask
        return create_attention_mask(num_tokens, self.shared.length, return_array, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write committed rows that are still aside and these rows; return all of them.

        Args:
            keys: Shape (1, heads, N, head size).
            values: Shape (1, heads, N, value size).

        Returns:
            Keys and values of the S committed tokens and of these N.
        """
        aside = self._rows_aside()
        everything = self.stock.update_and_fetch(
            mx.concatenate([*aside[0], keys], axis=2),
            mx.concatenate([*aside[1], values], axis=2),
        )
        if self.shared.mask is not None:
            self.stock.offset -= keys.shape[2]
            self.fresh = (keys, values)
        return everything

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows that the last `update_and_fetch` returned, for layers that share this one's."""
        keys, values, end = self.stock.state
        if self.shared.mask is not None and self.fresh is not None:
            end += self.fresh[0].shape[2]
        return keys[..., :end, :], values[..., :end, :]

    def write_committed(self) -> None:
        """Write the committed rows that are still aside into the buffer."""
        aside = self._rows_aside()
        if aside[0]:
            keys, values = (mx.concatenate(rows, axis=2) for rows in aside)
            self.stock.update_and_fetch(keys, values)

    def _rows_aside(self) -> tuple[list[mx.array], list[mx.array]]:
        """Committed keys and values that the buffer lacks; what it has counts from now on."""
        if self.fresh is None or self.stock.offset >= self.shared.length:
            return [], []
        self.stock.offset = self.shared.num_in_place
        keys, values = self.fresh
        aside = self.shared.aside
        return [keys[..., run, :] for run in aside], [values[..., run, :] for run in aside]


def consecutive_runs(numbers: Sequence[int]) -> list[slice]:
    """Numbers as runs of consecutive ones."""
    found: list[slice] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = slice(found[-1].start, number + 1)
        else:
            found.append(slice(number, number + 1))
    return found
