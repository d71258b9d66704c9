"""Layers that attend to all tokens or to a chunk: mlx-lm's buffers, and the entries of one tree.

Axes: N nodes of the tree, S committed tokens, H heads, D head size.

MLX copies a large buffer for a gather in the graph that also attends to it. So the entries of a
tree stay in arrays of their own, and the next forward pass writes those of the accepted path
together with its own, with one update per buffer. If the path begins with the first nodes of the
tree, in order, the buffer already holds their entries in place.

Invariant: The buffer holds the first ``stock.offset`` tokens, and the part in place of the path of
the pass of `_fresh`, which holds the entries of the rest of that path.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache, create_attention_mask

from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.target.caches.tree_pass import TreePass
from mlx_redrafter.target.few_shapes import bucket


class Entries(NamedTuple):
    """K/V entries of consecutive tokens of a sequence.

    Attributes:
        parts: Keys and values, or the codes, scales and biases of both, shape (1, H, S, D); empty
            for a layer that the model never uses.
        start: Position of the first token.
    """

    parts: list[mx.array]
    start: int


class FullCache:
    """The `LayerCache` of full attention, on top of mlx-lm's ``KVCache``."""

    def __init__(self, stock: Any):
        self.stock = stock
        # The cache whose buffer holds the entries.
        self._rows: Any = stock
        self._begin()

    def _begin(self) -> None:
        """Follow the cache of the entries, which holds all committed ones."""
        self.step = TreePass([self._rows.offset])
        # Keys and values of the newest tree, shape (1, H, N, D), and the pass that made them, until
        # the buffer holds the accepted ones.
        self._fresh: tuple[mx.array, mx.array, TreePass] | None = None
        # Number of entries with which the buffer ended with a bucket.
        self._whole = 0

    @property
    def start(self) -> int:
        """Position of the first entry of the buffer."""
        return getattr(self._rows, "start_position", 0)

    @property
    def offset(self) -> int:
        """Number of committed tokens before the forward pass."""
        return self.step.length

    def expect(self, step: TreePass) -> None:
        self.step = step

    def trim_to(self, length: int) -> None:
        self.write_aside()
        if self._rows.keys is not None:  # a layer that the model never uses stays empty
            self._rows.offset = length

    def release(self) -> Entries:
        self.write_aside()
        rows, start = self._rows, self.start
        parts = [] if rows.keys is None else arrays_of(*rows.keys_and_values())
        fill_rows(rows, Entries([], 0), 0)
        self._begin()
        return Entries(parts, start)

    def hold(self, entries: Entries, length: int) -> None:
        if entries.parts:  # else a layer that the model never uses
            fill_rows(self._rows, entries, length)
        self._begin()

    def write_aside(self) -> None:
        """Write the committed entries that the buffer lacks."""
        aside = self._aside()
        if aside:
            self._rows.update_and_fetch(*joined(aside))
        self._fresh = None

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if self.step.trees is None:
            return create_attention_mask(num_tokens, self.step.length, return_array, window_size)
        return self.step.layout(self.start).window_mask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the committed entries that the buffer lacks and new entries; return all entries."""
        aside = self._aside()
        new = joined([*aside, (keys, values)]) if aside else (keys, values)
        everything: tuple[mx.array, mx.array] = self._rows.update_and_fetch(*new)
        if self.step.trees is None:
            self._fresh = None
            return everything
        self._fresh = keys, values, self.step
        everything = self._attended()
        self._rows.offset -= keys.shape[2]
        return everything

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the last `update_and_fetch` returned, for layers that share the entries."""
        num_nodes = 0
        if self.step.trees is not None and self._fresh is not None:
            num_nodes = self._fresh[0].shape[2]
        self._rows.offset += num_nodes
        entries = self._attended()
        self._rows.offset -= num_nodes
        return entries

    def lend(self, num_nodes: int) -> tuple[mx.array, mx.array] | None:
        """Return buffers of whole buckets, with room for the entries of a tree.

        `write_all_aside` must come first. None for a layer that the model never uses.
        """
        if self._rows.keys is None:
            return None
        self._grow(self.step.length + num_nodes - self.start)
        return self._rows.keys, self._rows.values

    def take_back(
        self, keys: mx.array, values: mx.array, fresh_keys: mx.array, fresh_values: mx.array
    ) -> None:
        """Take the buffers back, with the entries of the tree behind the committed ones."""
        self._rows.keys, self._rows.values = keys, values
        self._fresh = fresh_keys, fresh_values, self.step

    def _grow(self, num_entries: int) -> None:
        """Let the buffer end with a bucket, because graphs know strides, too."""
        num_rows = self._rows.keys.shape[2]
        if num_rows == self._whole and num_entries <= num_rows:
            return
        self._whole = bucket(max(num_entries, num_rows))
        if self._whole > num_rows:
            reserve_rows([self._rows], self._whole)

    def _attended(self) -> tuple[mx.array, mx.array]:
        """Return the entries, and in a pass with buckets what stands behind them in the buffer."""
        rows = self._rows
        if self.step.trees is None or not self.step.has_buckets:
            return rows.keys_and_values()
        count = bucket(rows.offset - self.start)
        self._grow(count)
        return rows.keys[..., :count, :], rows.values[..., :count, :]

    def _aside(self) -> list[tuple[mx.array, mx.array]]:
        """Return the committed entries that the buffer lacks, and count those that it holds."""
        if self._fresh is None:
            return []
        keys, values, step = self._fresh
        nodes, self._rows.offset = step.moves[0]
        return [(keys[..., run, :], values[..., run, :]) for run in consecutive_runs(nodes)]


class ChunkCache(FullCache):
    """The `LayerCache` of attention to the tokens since the last multiple of the size of a chunk.

    mlx-lm's ``ChunkedKVCache`` keeps their entries in order. Models drop the oldest entries before
    every forward pass. This cache keeps more of them, for sequences that end before the newest path
    does, and drops them only now and then.
    """

    stock: ChunkedKVCache

    @property
    def start_position(self) -> int:
        return self.start

    def maybe_trim_front(self) -> None:
        """Drop entries that no later token needs, if there are many. Models call it every pass."""
        stock = self.stock
        kept = stock.chunk_size + MAX_BEAM_LENGTH
        dropped = self.step.length - stock.start_position - kept
        if dropped <= stock.step:
            return
        assert stock.keys is not None
        assert stock.values is not None
        self.write_aside()
        stock.start_position += dropped
        stock.keys = stock.keys[..., dropped:, :]
        stock.values = stock.values[..., dropped:, :]

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of a tree; for committed tokens, models make their own."""
        return self.step.layout(self.start).chunk_mask(self.stock.chunk_size)


def joined(parts: Sequence[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Join keys and values of consecutive tokens."""
    keys, values = (mx.concatenate(list(arrays), axis=2) for arrays in zip(*parts, strict=True))
    return keys, values


def arrays_of(keys: Any, values: Any) -> list[mx.array]:
    """List keys and values, or the codes, scales and biases of both."""
    return [*keys, *values] if isinstance(keys, tuple | list) else [keys, values]


def pair_of(arrays: Sequence[mx.array]) -> tuple[Any, Any]:
    """Return keys and values from the arrays of `arrays_of`."""
    if len(arrays) == 2:
        return arrays[0], arrays[1]
    half = len(arrays) // 2
    return tuple(arrays[:half]), tuple(arrays[half:])


def fill_rows(stock: Any, entries: Entries, length: int) -> None:
    """Let a cache of mlx-lm hold entries in the order of tokens, of which ``length`` count."""
    stock.keys, stock.values = pair_of(entries.parts) if entries.parts else (None, None)
    stock.offset = length
    if isinstance(stock, RotatingKVCache):
        stock._idx = stock.keys.shape[2]
    elif isinstance(stock, ChunkedKVCache):
        stock.start_position = entries.start


def write_all_aside(caches: Sequence[FullCache], path: mx.array | None) -> None:
    """Let the caches of a sequence write what their buffers lack, with one compiled graph.

    ``path`` has the nodes of a path that the host has not read, whose entries the buffers lack,
    int32, shape (L,); None if the caches know them.
    """
    fresh: list[mx.array] = []
    lacking, rows = [], []
    for one in caches:
        if one._fresh is None:
            continue
        keys, values, step = one._fresh
        nodes, start = step.moves[0]
        if path is not None:
            start = step.length
            one._grow(start + path.shape[0] - one.start)
        elif not nodes:
            continue
        fresh += keys, values
        lacking.append(one)
        rows.append(start - one.start)
    if not lacking:
        return
    starts = list(dict.fromkeys(rows))  # few, because equal windows begin with the same token
    indices = [starts.index(row) for row in rows]
    buffers = [part for one in lacking for part in (one._rows.keys, one._rows.values)]
    lacked = mx.array(list(nodes)) if path is None else path
    written = iter(_write_nodes(lacked, mx.array(starts), indices, buffers, fresh))
    for one in lacking:
        one._rows.keys, one._rows.values = next(written), next(written)
        one._rows.offset, one._fresh = one.step.length, None


@mx.compile
def _write_nodes(
    nodes: mx.array, starts: mx.array, rows: list[int], buffers: list[Any], fresh: list[mx.array]
) -> list[mx.array]:
    """Write entries of nodes into buffers of keys and values, at the starts of these rows."""
    return [
        mx.slice_update(buffer, mx.take(part, nodes, axis=2), starts[rows[number // 2]], axes=(2,))
        for number, (buffer, part) in enumerate(zip(buffers, fresh, strict=True))
    ]


def reserve_rows(caches: Sequence[Any], rows: int) -> None:
    """Give used caches of K/V entries buffers of at least ``rows`` entries."""

    def lengthen(part: mx.array) -> mx.array:
        return mx.pad(part, [(0, 0), (0, 0), (0, max(0, rows - part.shape[2])), (0, 0)])

    for cache in caches:
        cache.keys, cache.values = tree_map(lengthen, (cache.keys, cache.values))


def consecutive_runs(numbers: Sequence[int]) -> list[slice]:
    """Group numbers into slices of consecutive ones."""
    found: list[slice] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = slice(found[-1].start, number + 1)
        else:
            found.append(slice(number, number + 1))
    return found
