"""Prompt caches of finished texts, kept for later texts with the same beginning."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.target.caches.prompt_cache import num_tokens


class Prefixes:
    """mlx-lm's least-recently-used prompt caches, for one thread.

    Args:
        engine: Engine that wrote the texts.
        max_texts: Maximum number of caches to keep; 0 keeps none.
        max_bytes: Maximum size of all of them, in bytes.
    """

    def __init__(self, engine: Engine, max_texts: int, max_bytes: int):
        self._engine = engine
        self._max_texts = max_texts
        self._kept = LRUPromptCache(max_texts, max_bytes)

    @property
    def nbytes(self) -> int:
        """Size of the kept caches, in bytes."""
        return self._kept.nbytes

    def take(self, prompt: list[int]) -> tuple[list[Any], int]:
        """Return a cache for a text and how many prompt tokens it holds, at most all but one."""
        cache, rest = self._kept.fetch_nearest_cache(None, prompt)
        if cache is not None and not rest and can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, 1)
            rest = prompt[-1:]
        if cache is None or not rest:
            return self._engine.new_prompt_cache(), 0
        return cache, len(prompt) - len(rest)

    def keep(self, tokens: list[int], cache: list[Any]) -> None:
        """Keep the cache of a finished text if the cache records how many tokens it holds."""
        length = num_tokens(cache[: self._engine.target.num_layers])
        if self._max_texts and length:
            self._kept.insert_cache(None, tokens[:length], cache)
