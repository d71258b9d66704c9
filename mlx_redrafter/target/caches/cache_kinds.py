"""The kinds of mlx-lm's caches that can hold a tree, each with its `LayerCache`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_redrafter.target.caches.full import ChunkCache, FullCache
from mlx_redrafter.target.caches.quantised import QuantisedCache
from mlx_redrafter.target.caches.recurrent import RecurrentCache
from mlx_redrafter.target.caches.sliding import SlidingCache
from mlx_redrafter.target.caches.tree_cache import LayerCache, parts_of


class CompositeCache(CacheList):
    """A layer with several caches, each with its `LayerCache`, which `TreeCache` addresses."""

    def __init__(self, stock: CacheList):
        super().__init__(*[LAYER_CACHES[type(part)](part) for part in stock.caches])
        self.stock = stock


# Constructors of `LayerCache`, or of several, by kind of mlx-lm's cache.
LAYER_CACHES: Mapping[type, Callable[[Any], LayerCache | CompositeCache]] = {
    KVCache: FullCache,
    RotatingKVCache: SlidingCache,
    ChunkedKVCache: ChunkCache,
    QuantizedKVCache: QuantisedCache,
    ArraysCache: RecurrentCache,
    CacheList: CompositeCache,
}


def copy_rows(caches: Iterable[Any], rows: Sequence[int], others: Iterable[Any]) -> None:
    """Let other caches of the same kinds hold some rows of a batch."""
    chosen = mx.array(list(rows))

    def copied(part: Any) -> Any:
        return part[chosen] if isinstance(part, mx.array) else part

    for cache, other in zip(parts_of(caches), parts_of(others), strict=True):
        other.state = tree_map(copied, cache.state)


def holds_trees(cache: Any) -> bool:
    """Whether a cache can hold a tree. A ring that always keeps the first tokens cannot."""
    return type(cache) in LAYER_CACHES and all(
        type(part) in LAYER_CACHES and not getattr(part, "keep", 0) for part in parts_of([cache])
    )


def describe(cache: Any) -> str:
    """Name a cache's kind and sizes, as in ``RotatingKVCache(max_size=512, keep=0)``."""
    if isinstance(cache, CacheList):
        return f"CacheList({', '.join(map(describe, cache.caches))})"
    names = "max_size", "keep", "chunk_size", "group_size", "bits"
    sizes = ", ".join(f"{name}={getattr(cache, name)}" for name in names if hasattr(cache, name))
    return f"{type(cache).__name__}({sizes})"
