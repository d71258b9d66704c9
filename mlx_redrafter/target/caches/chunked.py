"""A layer that attends to its own chunk of the text: the tokens since the last multiple of C.

Axes: N nodes of the tree, C tokens of a chunk.

mlx-lm's cache is in the order of the text, so it takes the rows of trees as that of a layer that
attends to all tokens does. Models drop its oldest rows before every forward pass; here more of them
stay, for texts that end before the newest path does, and they are dropped once in a while.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.target.caches.full import FullCache


class ChunkCache(FullCache):
    """The `LayerCache` of chunked attention, on top of mlx-lm's ``ChunkedKVCache``."""

    stock: ChunkedKVCache

    @property
    def start_position(self) -> int:
        """Position of the first row."""
        return int(self.stock.start_position)

    def maybe_trim_front(self) -> None:
        """Drop rows that no later token sees, where they are many; models ask before each pass."""
        stock = self.stock
        kept = stock.chunk_size + MAX_BEAM_LENGTH
        if stock.offset - stock.start_position <= kept + stock.step:
            return
        assert stock.keys is not None
        assert stock.values is not None
        self.write_aside()
        dropped = stock.offset - stock.start_position - kept
        stock.start_position += dropped
        stock.keys = stock.keys[..., dropped:, :]
        stock.values = stock.values[..., dropped:, :]

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """What the nodes of a tree may attend to; for other tokens, models make the mask."""
        return self._step.chunk_mask(self.stock.chunk_size, self.start_position)
