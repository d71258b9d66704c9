"""Quantised layers hold the codes that mlx-lm's cache gives to the same rows, one by one."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.target.caches.full import FullCache
from mlx_redrafter.target.caches.quantised import QuantisedCache, QuantisingCache
from mlx_redrafter.target.caches.tree_cache import TreeCache
from tests.helpers.drafts import make_tree

HEADS, SIZE = 2, 32
Rows = tuple[mx.array, mx.array]


def random_rows(count: int) -> Rows:
    """Keys and values of some tokens."""
    return mx.random.normal((1, HEADS, count, SIZE)), mx.random.normal((1, HEADS, count, SIZE))


def decode(cache: TreeCache, stock: KVCache | QuantizedKVCache, rng: random.Random) -> None:
    """A random tree and a path of it; mlx-lm's cache gets the path's rows token by token."""
    size = rng.randrange(2, 12)
    parents = [0, *(rng.randrange(node) for node in range(1, size))]
    path = [rng.randrange(size)]
    while path[0]:
        path.insert(0, parents[path[0]])
    keys, values = random_rows(size)
    cache.expect(make_tree(range(size), parents, size))
    cache.layers[0].update_and_fetch(keys, values)  # type: ignore[attr-defined]
    cache.commit(path)
    for node in path:
        one = slice(node, node + 1)
        stock.update_and_fetch(keys[..., one, :], values[..., one, :])


def assert_same_codes(found: QuantizedKVCache, expected: QuantizedKVCache) -> None:
    """Two caches hold the same codes, scales and biases."""
    assert found.offset == expected.offset
    for rows, truth in zip(found.keys_and_values(), expected.keys_and_values(), strict=True):
        for part, other in zip(rows, truth, strict=True):
            assert mx.array_equal(part, other).item()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("seed", range(2))
def test_equal_rows_have_equal_codes(seed: int, bits: int) -> None:
    mx.random.seed(seed)
    rng = random.Random(seed)
    stock = QuantizedKVCache(group_size=32, bits=bits)
    cache = TreeCache([QuantisedCache(QuantizedKVCache(group_size=32, bits=bits))], 0)
    for _ in range(60):  # more than one block of rows
        decode(cache, stock, rng)
    cache.trim_to(cache.length)
    assert_same_codes(cache.stock[0], stock)
    shorter = cache.length - 2
    cache.trim_to(shorter)
    stock.trim(2)
    assert_same_codes(cache.stock[0], stock)


@pytest.mark.parametrize("start", [1, 7, 40])
def test_rows_before_the_start_get_the_codes_of_mlx_lms_conversion(start: int) -> None:
    rng = random.Random(start)
    plain = KVCache()
    given = [KVCache()]
    quantisation = Quantisation(8, 32, start)
    cache = QuantisingCache([FullCache(given[0])], 0, quantisation, given)
    while cache.length < start:
        decode(cache, plain, rng)
    stock = plain.to_quantized(group_size=32, bits=8)
    assert type(given[0]) is KVCache  # until the text ends
    for _ in range(5):
        decode(cache, stock, rng)
    cache.trim_to(cache.length)
    assert_same_codes(given[0], stock)  # type: ignore[arg-type]
