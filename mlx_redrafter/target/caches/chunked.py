"""A layer that attends to its own chunk: the tokens since the last multiple of C.

Axes: N nodes of the tree, C tokens per chunk.

mlx-lm keeps the entries of a chunk in order, so trees use its buffers as in `full`. Models drop the
oldest entries before every forward pass. This cache keeps more of them, for sequences that end
before the newest path does, and drops them only now and then.
"""

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.target.caches.full import FullCache


class ChunkCache(FullCache):
    """The `LayerCache` of chunked attention, on top of mlx-lm's ``ChunkedKVCache``."""

    stock: ChunkedKVCache

    @property
    def start_position(self) -> int:
        return int(self.stock.start_position)

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
        return self.step.layout(self.start_position).chunk_mask(self.stock.chunk_size)
