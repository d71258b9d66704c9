"""Locks of prompt caches: one stream at a time writes to a cache."""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from mlx_redrafter.engine.responses import ResponseStream
from mlx_redrafter.errors import ConfigError


class CacheLocks:
    """Streams by the prompt caches that they write to, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: weakref.WeakKeyDictionary[Any, weakref.ref[ResponseStream]] = (
            weakref.WeakKeyDictionary()
        )

    def check(self, layers: Sequence[Any]) -> None:
        """Raise `ConfigError` if a stream has one of the caches, or if two layers are one."""
        if len(set(map(id, layers))) < len(layers):
            raise ConfigError(
                "prompt_cache has one cache object in several layers; make it with "
                "mlx_lm.models.cache.make_prompt_cache(model)"
            )
        streams = [known() for known in map(self._streams.get, layers) if known is not None]
        if any(stream is not None and not stream.is_closed for stream in streams):
            raise ConfigError(
                "prompt_cache is in use by a text that has not ended; read that one to its end or "
                "close it, or give a copy of the cache"
            )

    def claim(self, layers: Sequence[Any], stream: ResponseStream) -> None:
        """Lock caches for a stream, after a `check`, until it is closed or nobody refers to it."""
        with self._lock:
            self.check(layers)
            for layer in layers:
                self._streams[layer] = weakref.ref(stream)
