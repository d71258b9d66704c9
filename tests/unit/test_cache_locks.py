"""Locks of prompt caches: one stream at a time, in any thread."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_redrafter.engine.cache_locks import CacheLocks
from mlx_redrafter.errors import ConfigError


class Layer:
    """A cache of one layer."""


class Stream:
    """A stream that may be closed."""

    is_closed = False


def test_a_cache_is_locked_until_its_stream_is_closed() -> None:
    locks, layers = CacheLocks(), [Layer(), Layer()]
    first: Any = Stream()
    locks.claim(layers, first)
    for taken in (layers, layers[1:]):
        with pytest.raises(ConfigError, match="in use by a text that has not ended"):
            locks.claim(taken, first)
    locks.check([Layer()])
    first.is_closed = True
    locks.claim(layers, first)


def test_a_cache_of_a_stream_that_nobody_has_is_free() -> None:
    locks, layers = CacheLocks(), [Layer()]
    stream: Any = Stream()
    locks.claim(layers, stream)
    del stream
    locks.check(layers)


def test_layers_have_a_cache_each() -> None:
    layer = Layer()
    with pytest.raises(ConfigError, match="one cache object in several layers"):
        CacheLocks().check([layer, layer])
