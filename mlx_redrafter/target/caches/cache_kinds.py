"""The kinds of mlx-lm's caches that can hold a tree, and how each does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_redrafter.target.caches.chunked import ChunkCache
from mlx_redrafter.target.caches.composite import CompositeCache
from mlx_redrafter.target.caches.full import FullCache
from mlx_redrafter.target.caches.quantised import QuantisedCache
from mlx_redrafter.target.caches.recurrent import RecurrentCache
from mlx_redrafter.target.caches.sliding import SlidingCache
from mlx_redrafter.target.caches.tree_cache import LayerCache


def _compose(cache: CacheList) -> CompositeCache:
    return CompositeCache(cache, [LAYER_CACHES[type(part)](part) for part in cache.caches])


LAYER_CACHES: Mapping[type, Callable[[Any], LayerCache]] = {
    KVCache: FullCache,
    RotatingKVCache: SlidingCache,
    ChunkedKVCache: ChunkCache,
    QuantizedKVCache: QuantisedCache,
    ArraysCache: RecurrentCache,
    CacheList: _compose,
}


def parts_of(caches: Iterable[Any]) -> list[Any]:
    """Caches with the parts of those that are made of several in their place."""
    parts: list[Any] = []
    for cache in caches:
        parts.extend(parts_of(cache.caches) if isinstance(cache, CacheList) else [cache])
    return parts


def holds_trees(cache: Any) -> bool:
    """Whether a cache can hold a tree; a ring that keeps the first tokens cannot."""
    return type(cache) in LAYER_CACHES and all(
        type(part) in LAYER_CACHES and not getattr(part, "keep", 0) for part in parts_of([cache])
    )


def describe(cache: Any) -> str:
    """The kind of a cache and its sizes, as in ``RotatingKVCache(max_size=512, keep=0)``."""
    if isinstance(cache, CacheList):
        return f"CacheList({', '.join(map(describe, cache.caches))})"
    names = "max_size", "keep", "chunk_size", "group_size", "bits"
    sizes = ", ".join(f"{name}={getattr(cache, name)}" for name in names if hasattr(cache, name))
    return f"{type(cache).__name__}({sizes})"
