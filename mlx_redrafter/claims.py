"""Prompt caches that texts are writing to, each to be claimed by one text at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.responses import ResponseStream


class Claims:
    """Streams by the prompt caches that they write to, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: weakref.WeakKeyDictionary[Any, weakref.ref[ResponseStream]] = (
            weakref.WeakKeyDictionary()
        )

    def claim(self, layers: Sequence[Any], stream: ResponseStream) -> None:
        """Give caches to a stream until it is closed or forgotten.

        Raises:
            ConfigError: Another stream has one of them, or two layers are one.
        """
        if len(set(map(id, layers))) < len(layers):
            raise ConfigError(
                "prompt_cache has one cache object in several layers; make it with "
                "mlx_lm.models.cache.make_prompt_cache(model)"
            )
        with self._lock:
            for layer in layers:
                known = self._streams.get(layer)
                other = None if known is None else known()
                if other is not None and not other.is_closed:
                    raise ConfigError(
                        "prompt_cache is in use by a text that has not ended; read that one to "
                        "its end or close it, or give a copy of the cache"
                    )
            for layer in layers:
                self._streams[layer] = weakref.ref(stream)
