"""The kinds of mlx-lm's caches that can hold a tree, and how each does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_redrafter.target.caches.chunked import ChunkCache
from mlx_redrafter.target.caches.full import FullCache
from mlx_redrafter.target.caches.quantised import QuantisedCache
from mlx_redrafter.target.caches.recurrent import RecurrentCache
from mlx_redrafter.target.caches.sliding import SlidingCache
from mlx_redrafter.target.caches.tree_cache import LayerCache

LAYER_CACHES: Mapping[type, Callable[[Any], LayerCache]] = {
    KVCache: FullCache,
    RotatingKVCache: SlidingCache,
    ChunkedKVCache: ChunkCache,
    QuantizedKVCache: QuantisedCache,
    ArraysCache: RecurrentCache,
}


def holds_trees(cache: Any) -> bool:
    """Whether a cache can hold a tree; a ring that keeps the first tokens cannot."""
    return type(cache) in LAYER_CACHES and not getattr(cache, "keep", 0)


def describe(cache: Any) -> str:
    """The kind of a cache and its sizes, as in ``RotatingKVCache(max_size=512, keep=0)``."""
    names = "max_size", "keep", "chunk_size", "group_size", "bits"
    sizes = ", ".join(f"{name}={getattr(cache, name)}" for name in names if hasattr(cache, name))
    return f"{type(cache).__name__}({sizes})"
