"""Prompt caches that texts are writing to, each to be claimed by one text at a time."""

from __future__ import annotations

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
        """Check that caches are free, and one for each layer.

        Raises:
            ConfigError: A stream has one of them, or two layers are one.
        """
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
        """Give caches to a stream until it is closed or forgotten, as far as they `check`."""
        with self._lock:
            self.check(layers)
            for layer in layers:
                self._streams[layer] = weakref.ref(stream)
