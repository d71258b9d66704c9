"""The entries that one block attends to while decoding.

Axes: C new rows of context, B entries of the block, S rows of a buffer, D head size.

A pass writes the keys and values of new context and of the block to a buffer at once, and attends
to all rows with a mask. The mask hides the rows of rejected drafts: the device knows the number of
accepted ones, and the host does not wait for it. The next pass overwrites the block's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from mlx_redrafter.proposers.block.layers import BlockLayer, KeysValues


class DecodingSurroundings:
    """Verified tokens of one sequence, and one block after them; a `Surroundings`.

    Args:
        layers: Layers of the network.
        caches: Their buffers, which hold the first ``first`` tokens.
        features: Rows of `BlockNetwork.fuse` of the tokens after those, shape (1, C, H). Rows
            beyond the root are junk.
        first: Number of tokens in the buffers.
        least: Lowest position that ``root`` can be.
        root: Position of the last row of context that counts, int32, shape (1,).
        num_entries: Number of entries of the block, B.
    """

    def __init__(
        self,
        layers: Sequence[BlockLayer],
        caches: Sequence[KVCache | ChunkedKVCache],
        features: mx.array,
        first: int,
        least: int,
        root: mx.array,
        num_entries: int,
    ):
        self.layers, self.caches, self.features = layers, caches, features
        self.first, self.least, self.root = first, least, root
        self.num_entries = num_entries
        self._masks: dict[tuple[int, int | None, bool], mx.array] = {}

    @property
    def offset(self) -> mx.array:
        return self.root + 1

    def attend(
        self, layer: int, queries: mx.array, own: KeysValues, scale: float, sinks: mx.array | None
    ) -> mx.array:
        context = self.layers[layer].self_attn.keys_values(self.features, self.first)
        return self.attend_to(context, layer, queries, own, scale, sinks)

    def attend_to(
        self,
        context: KeysValues,
        layer: int,
        queries: mx.array,
        own: KeysValues,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend as `attend`, given the keys and values of the new rows of context."""
        attention, cache = self.layers[layer].self_attn, self.caches[layer]
        window = attention.config.windows[layer]
        new = [mx.concatenate(list(pair), axis=2) for pair in zip(context, own, strict=True)]
        keys, values = write(cache, *new)
        start = 0 if window is None else max(0, self.least + 2 - window)
        buffered = getattr(cache, "start_position", 0)
        skipped = max(0, start - buffered)
        out: mx.array = mx.fast.scaled_dot_product_attention(
            queries,
            keys[..., skipped:, :],
            values[..., skipped:, :],
            scale=scale,
            mask=self._mask(buffered + skipped, window, attention.config.causal[layer]),
            sinks=sinks,
        )
        return out

    def _mask(self, start: int, window: int | None, causal: bool) -> mx.array:
        """Build the mask of a layer to the rows from a position on, shape (B, S)."""
        key = start, window, causal
        if key not in self._masks:
            block = self.first + self.features.shape[1]
            rows = mx.arange(start, block + self.num_entries)
            entries = mx.arange(self.num_entries)[:, None]
            seen = rows <= self.root
            if window is not None:
                seen = seen & (self.root + 1 + entries - rows < window)
            own = rows >= block
            if causal:
                own = own & (rows <= block + entries)
            self._masks[key] = seen | own
        return self._masks[key]


class JointSurroundings:
    """Verified tokens of several sequences, and one block after those of each; a `Surroundings`."""

    def __init__(self, parts: Sequence[DecodingSurroundings]):
        self._parts = parts
        self._ends = list(accumulate(part.features.shape[1] for part in parts))
        # A row of context of any sequence is a block of one entry here.
        self._rows = mx.concatenate([part.features for part in parts], axis=1).swapaxes(0, 1)
        places = [range(part.first, part.first + part.features.shape[1]) for part in parts]
        self._places = mx.array(list(chain(*places)), dtype=mx.int32)

    @property
    def offset(self) -> mx.array:
        return mx.concatenate([part.offset for part in self._parts])

    def attend(
        self, layer: int, queries: mx.array, own: KeysValues, scale: float, sinks: mx.array | None
    ) -> mx.array:
        attention = self._parts[0].layers[layer].self_attn
        rows = attention.keys_values(self._rows, self._places)
        keys, values = (mx.split(x.transpose(2, 1, 0, 3), self._ends[:-1], axis=2) for x in rows)
        found = []
        for i, part in enumerate(self._parts):
            block = own[0][i : i + 1], own[1][i : i + 1]
            context = keys[i], values[i]
            found.append(part.attend_to(context, layer, queries[i : i + 1], block, scale, sinks))
        return mx.concatenate(found)


def write(cache: KVCache | ChunkedKVCache, keys: mx.array, values: mx.array) -> KeysValues:
    """Append rows to a buffer and return all rows; a full bounded one drops its oldest first."""
    if isinstance(cache, ChunkedKVCache) and cache.keys is not None:
        num_rows = cache.offset - cache.start_position + keys.shape[2]
        if num_rows > cache.keys.shape[2]:
            cache.maybe_trim_front()
    found: KeysValues = cache.update_and_fetch(keys, values)
    return found
