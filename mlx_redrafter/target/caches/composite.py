"""A layer with several caches, as one with a state beside attention: mlx-lm's ``CacheList``."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.models.cache import CacheList

from mlx_redrafter.target.caches.tree_cache import ForwardPass, LayerCache


class CompositeCache:
    """The `LayerCache` of a layer with several caches.

    Attributes:
        stock: mlx-lm's cache.
        parts: The `LayerCache` of each cache in it, in mlx-lm's order.
    """

    def __init__(self, stock: CacheList, parts: Sequence[LayerCache]):
        self.stock = stock
        self.parts = parts

    def expect(self, step: ForwardPass) -> None:
        """See `LayerCache.expect`."""
        for part in self.parts:
            part.expect(step)

    def commit(self, path: Sequence[int]) -> None:
        """See `LayerCache.commit`."""
        for part in self.parts:
            part.commit(path)

    def settle(self, length: int) -> None:
        """See `LayerCache.settle`."""
        for part in self.parts:
            part.settle(length)

    def __getitem__(self, index: int) -> LayerCache:
        """The part that a model asks for."""
        return self.parts[index]
