"""The entries that blocks attend to while decoding.

Axes: R sequences, C new rows of context of a sequence, B entries of a block, S rows of a buffer, D
head size.

A pass writes the keys and values of new context and of the block to a buffer at once, and attends
to all rows with a mask. It hides the rows of rejected drafts, whose number the host need not know.
The next pass overwrites the block's rows.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.layers import BlockAttention


class Surrounding(NamedTuple):
    """Verified tokens of one sequence, after which a block stands.

    Attributes:
        caches: Buffers of the network's layers, which hold the first ``first`` tokens.
        features: Rows of `BlockNetwork.fuse` of the tokens after those, shape (C, H), and junk.
        least: Lowest position that ``last`` can be.
        last: Position of the last row of context that counts, int32, shape (1,).
    """

    caches: Sequence[KVCache | ChunkedKVCache]
    features: mx.array
    first: int
    least: int
    last: mx.array

    @property
    def end(self) -> int:
        """Row of the buffer that is the block's first one."""
        return self.first + self.features.shape[0]

    def mask(self, start: int, size: int, config: BlockConfig, layer: int) -> mx.array:
        """Build the mask of B = ``size`` entries to the rows from a position on, shape (B, S)."""
        rows = mx.arange(start, self.end + size)
        entries = mx.arange(size)[:, None]
        seen, window = rows <= self.last, config.windows[layer]
        if window is not None:
            place = self.last + 1 if config.windows_from_root else self.last + 1 + entries
            seen = seen & (place - rows < window)
        own = rows >= self.end
        if config.causal[layer]:
            own = own & (rows <= self.end + entries)
        return seen | own


class DecodingSurroundings:
    """Verified tokens of R sequences, and a block of B entries after each; a `Surroundings`."""

    def __init__(self, parts: Sequence[Surrounding], num_entries: int):
        self.parts, self.num_entries = parts, num_entries
        self.offset = mx.concatenate([part.last for part in parts]) + 1
        self._ends = list(accumulate(len(part.features) + num_entries for part in parts))[:-1]
        entries = mx.arange(1, num_entries + 1)
        positions = [(mx.arange(one.first, one.end), one.last + entries) for one in parts]
        self._positions = mx.concatenate(list(chain(*positions)))
        self._masks: dict[tuple[int, int, int | None, bool], mx.array] = {}

    def attend(self, attention: BlockAttention, queries: mx.array, x: mx.array) -> mx.array:
        blocks = mx.split(x.flatten(0, 1), len(self.parts))
        pairs = ((part.features, block) for part, block in zip(self.parts, blocks, strict=True))
        rows = mx.concatenate(list(chain(*pairs)))[:, None]  # each of them a block of one entry
        new = attention.keys_values(rows, self._positions)
        keys, values = (mx.split(y.transpose(2, 1, 0, 3), self._ends, axis=2) for y in new)
        found = [
            self._attend(attention, i, queries[i : i + 1], keys[i], values[i])
            for i in range(len(self.parts))
        ]
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def _attend(
        self, attention: BlockAttention, i: int, queries: mx.array, keys: mx.array, values: mx.array
    ) -> mx.array:
        """Compute the attention of one sequence's block, given the new rows of its buffer."""
        part, config, layer = self.parts[i], attention.config, attention.index
        cache, window = part.caches[layer], config.windows[layer]
        keys, values = write(cache, keys, values)
        start = 0 if window is None else max(0, part.least + 2 - window)
        buffered = getattr(cache, "start_position", 0)
        skipped = max(0, start - buffered)
        kind = i, buffered + skipped, window, config.causal[layer]
        if kind not in self._masks:
            self._masks[kind] = part.mask(buffered + skipped, self.num_entries, config, layer)
        if skipped:
            keys, values = keys[..., skipped:, :], values[..., skipped:, :]
        attend, mask = mx.fast.scaled_dot_product_attention, self._masks[kind]
        scale, sinks = attention.scale, attention.sinks
        return attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def write(
    cache: KVCache | ChunkedKVCache, keys: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    """Append rows to a buffer and return all rows; a full bounded one drops its oldest first."""
    if isinstance(cache, ChunkedKVCache) and cache.keys is not None:
        num_rows = cache.offset - cache.start_position + keys.shape[2]
        if num_rows > cache.keys.shape[2]:
            cache.maybe_trim_front()
    return cache.update_and_fetch(keys, values)
