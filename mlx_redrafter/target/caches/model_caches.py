"""Caches of a model: new ones, the caller's, those of a batch, and copies of their parts."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, make_prompt_cache

from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.target.caches import stored_cache
from mlx_redrafter.target.caches.batch_cache import BatchCache
from mlx_redrafter.target.caches.cache_kinds import LAYER_CACHES
from mlx_redrafter.target.caches.full import reserve_rows
from mlx_redrafter.target.caches.prompt_cache import check_prompt_cache, num_tokens
from mlx_redrafter.target.caches.quantised import QuantisingCache, check_quantisation
from mlx_redrafter.target.caches.tree_cache import TreeCache, parts_of


class ModelCaches:
    """Maker of a model's caches, which `LedCaches` extends to several machines.

    ``has_buckets`` is whether trees attend to whole buckets of K/V entries, as in `few_shapes`.
    """

    def __init__(self, model: nn.Module, has_buckets: bool):
        self._model = model
        self.has_buckets = has_buckets

    def new(
        self,
        prompt_cache: Sequence[Any] | None = None,
        quantisation: Quantisation | None = None,
        given: list[Any] | None = None,
    ) -> TreeCache:
        """Create the cache of one sequence, which continues mlx-lm caches if there are any.

        ``given`` is the caller's list, which begins with these. `TreeCache.trim_to` replaces its
        caches by quantised ones, as mlx-lm does.
        """
        stock = self.stock(prompt_cache)
        layers = [LAYER_CACHES[type(layer)](layer) for layer in stock]
        length = num_tokens(stock) or 0
        has_codes = any(isinstance(part, QuantizedKVCache) for part in parts_of(stock))
        has_buckets = self.has_buckets and not has_codes
        if quantisation is None:
            return TreeCache(layers, length, has_buckets)
        check_quantisation(self._model, quantisation, stock)
        return QuantisingCache(layers, length, quantisation, given, has_buckets)

    def stock(self, prompt_cache: Sequence[Any] | None = None) -> list[Any]:
        """Check the caller's caches as `new` does, or make new ones as mlx-lm does."""
        own: list[Any] = make_prompt_cache(self._model)
        if prompt_cache is None:
            return own
        # Never computed: this pass only gives the caches of used layers their shapes.
        self._model(mx.array([[0]]), cache=own)
        check_prompt_cache(prompt_cache, own)
        return list(prompt_cache)

    def of_batch(self) -> BatchCache:
        """Create a cache of several sequences."""
        return BatchCache(self.has_buckets)

    def reserve(self, cache: TreeCache, num_rows: int) -> None:
        """Give the used layers of a cache that hold K/V entries room for ``num_rows``."""
        kinds = KVCache | ChunkedKVCache | QuantizedKVCache
        found = [one for one in parts_of(cache.stock) if isinstance(one, kinds)]
        reserve_rows([one for one in found if one.keys is not None], num_rows)

    copy_entries = staticmethod(stored_cache.copy_entries)
    copy_states = staticmethod(stored_cache.copy_states)
    fill = staticmethod(stored_cache.fill)
