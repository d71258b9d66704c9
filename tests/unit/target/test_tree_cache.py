"""Caches of trees: what they hold after commits, interruptions and trimming, and what nodes see."""

import random
import weakref
from collections.abc import Sequence
from itertools import compress
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from mlx_redrafter.bench.lab.contexts import prefill
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH, DraftPlan
from mlx_redrafter.target import few_shapes
from mlx_redrafter.target.caches.sliding import SlidingCache
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.caches.tree_pass import TreePass
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TreeBatch
from tests.helpers.drafts import grow, make_tree
from tests.helpers.models import tiny_llama
from tests.helpers.oracles import node_paths

VOCAB_SIZE = 64
PLAN = DraftPlan.of(4, 5, 9)
BLOCK = 16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are full, and copied, after few tokens."""
    monkeypatch.setattr(KVCache, "step", BLOCK)
    monkeypatch.setattr(ChunkedKVCache, "step", BLOCK)
    monkeypatch.setattr(few_shapes, "BUCKET", BLOCK)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_llama(seed=1))


def prefilled(model: nn.Module, tokens: Sequence[int]) -> list[KVCache]:
    """Stock caches after a plain forward pass over ``tokens``."""
    cache: list[KVCache] = make_prompt_cache(model)
    model(mx.array([list(tokens)]), cache=cache)
    return cache


def assert_same_rows(found: Sequence[KVCache], expected: Sequence[KVCache]) -> None:
    """The caches hold the same tokens at the same offsets."""
    for layer, reference in zip(found, expected, strict=True):
        assert layer.offset == reference.offset
        for rows, truth in zip(layer.keys_and_values(), reference.keys_and_values(), strict=True):
            np.testing.assert_allclose(np.array(rows), np.array(truth), atol=2e-5, rtol=0)


def _decode_tree(
    target: Target, cache: TreeCache, tokens: list[int], parents: list[int], path: list[int]
) -> None:
    tree = make_tree(tokens, parents, PLAN.shape.levels)
    forward = target.verify(tree, cache)
    mx.async_eval(forward.logits)
    cache.commit(path)


def test_rows_allocated_stay_within_one_block_of_plain_decoding(target):
    """At most plain decoding's rows + N + L, rounded up to a block."""
    nodes, length = 9, 5
    cache, plain = target.caches.new(), target.caches.new()
    rng = random.Random(0)
    prefill(target, mx.array([1, 2, 3]), cache, 512)
    prefill(target, mx.array([1, 2, 3]), plain, 512)
    while cache.length < 10 * BLOCK:
        tokens, parents = grow(rng, 7, [], PLAN, VOCAB_SIZE, accuracy=0)
        path = rng.choice(node_paths(parents))
        _decode_tree(target, cache, tokens, parents, path)
        for _ in path:
            target.advance(mx.array([7]), plain)
        for layer, reference in zip(cache.stock, plain.stock, strict=True):
            extra = -(-(nodes + length) // BLOCK) * BLOCK
            assert layer.keys.shape[2] <= reference.keys.shape[2] + extra


@pytest.mark.usefixtures("no_collector")
def test_buffers_go_with_the_request(target):
    cache = target.caches.new()
    prefill(target, mx.array([1, 2, 3]), cache, 512)
    _decode_tree(target, cache, [4, 5], [0, 0], [0, 1])
    layer = weakref.ref(cache.layers[0])
    del cache
    assert layer() is None


def feed(layer: RotatingKVCache | SlidingCache, numbers: Sequence[int]) -> list[list[int]]:
    """Give a layer the rows of one forward pass; what each of its tokens sees, in order."""
    mask = layer.make_mask(len(numbers), return_array=True)
    rows = mx.array(numbers, dtype=mx.float32).reshape(1, 1, -1, 1)
    keys, values = layer.update_and_fetch(rows, -rows)
    assert mx.array_equal(keys, -values)
    # What layers that share these rows get.
    assert all(map(mx.array_equal, layer.keys_and_values(), (keys, values)))
    shape = (len(numbers), keys.shape[2])
    seen: Any = mx.ones(shape, dtype=mx.bool_) if mask is None else mask
    found = [int(number) for number in keys.reshape(-1).tolist()]
    return [[*compress(found, row)] for row in seen.reshape(shape).tolist()]


def read_in_chunks(
    ring: RotatingKVCache, numbers: Sequence[int], sizes: Sequence[int]
) -> list[list[int]]:
    """What tokens see that a ring reads in chunks, as sets, for rings have orders of their own."""
    seen, done = [], 0
    for size in sizes:
        seen += feed(ring, numbers[done : done + size])
        done += size
    return [sorted(row) for row in seen]


class Reading:
    """A text of numbers, read by a `SlidingCache` in any steps, and what its tokens should see."""

    def __init__(self, window: int, rng: random.Random, has_buckets: bool = False):
        self.window, self.rng = window, rng
        self.layer = SlidingCache(RotatingKVCache(window))
        self.cache = TreeCache([self.layer], 0, has_buckets)
        self.text: list[int] = []
        self.newest = 1  # tokens of the newest step
        self.next = 1

    def numbers(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def prompt(self, sizes: Sequence[int]) -> None:
        numbers = self.numbers(sum(sizes))
        read_in_chunks(self.layer.stock, numbers, sizes)
        self.text += numbers
        self.cache.length += len(numbers)

    def token(self) -> None:
        (number,) = self.numbers(1)
        self.cache.expect(None)
        (seen,) = feed(self.layer, [number])
        self.cache.length += 1
        self.text.append(number)
        self.newest = 1
        assert sorted(seen) == self.text[-self.window :]

    def tree(self, size: int, depth: int, is_kept: bool = True) -> None:
        parents, depths = [0], [0]
        share = self.rng.choice([0.0, 0.9])  # of nodes below the newest one, for long paths
        while len(parents) < size:
            above = [node for node in range(len(parents)) if depths[node] < depth]
            parent = above[-1] if self.rng.random() < share else self.rng.choice(above)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        numbers, paths = self.numbers(size), node_paths(parents)
        self.cache.expect(make_tree(numbers, parents, depth))
        for path, seen in zip(paths, feed(self.layer, numbers), strict=True):
            text = [*self.text, *(numbers[node] for node in path)]
            assert seen == text[-self.window :]
        if is_kept:
            path = self.rng.choice(paths)
            self.cache.commit(path)
            self.text += [numbers[node] for node in path]
            self.newest = len(path)

    def trim_to(self, length: int) -> None:
        """End the text after ``length`` tokens; mlx-lm's ring goes on as one that read it."""
        self.cache.trim_to(length)
        del self.text[length:]
        sizes = [self.rng.choice([1, 1, 1, 2, 5]) for _ in range(2 * self.window)]
        reference = RotatingKVCache(self.window)
        read_in_chunks(reference, self.text, [1] * length)
        stock = self.layer.stock
        assert (stock.offset, stock.size()) == (reference.offset, reference.size())
        numbers = self.numbers(sum(sizes))
        assert read_in_chunks(stock, numbers, sizes) == read_in_chunks(reference, numbers, sizes)


@given(
    seed=st.integers(0, 10**6),
    window=st.integers(1, 12) | st.just(40),
    prompt=st.lists(st.integers(1, 30), max_size=3),
    steps=st.integers(0, 30),
    has_buckets=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_steps_see_what_single_tokens_do(seed, window, prompt, steps, has_buckets):
    """The text may end anywhere in its newest path, also while a tree is in flight."""
    rng = random.Random(seed)
    reading = Reading(window, rng, has_buckets)
    reading.prompt(prompt)
    for _ in range(steps):
        if rng.random() < 0.3:
            reading.token()
        else:
            reading.tree(rng.randint(2, 24), rng.randint(1, MAX_BEAM_LENGTH - 1))
    back = rng.randrange(reading.newest) if steps else 0
    if steps and rng.random() < 0.5:  # for which the buffer may be too small
        reading.tree(4 * BLOCK, 4, is_kept=False)
    reading.trim_to(len(reading.text) - back)


@pytest.mark.parametrize("window", [1, 3, 8, 40])
@pytest.mark.parametrize("sizes", [[1], [5], [1, 1], [8, 8], [30], [30, 1]])
def test_a_pass_that_was_interrupted_is_forgotten(window, sizes):
    """The layers before the interruption have read its tokens already."""
    for last in (1, 2, 20):
        reading = Reading(window, random.Random(last))
        reading.prompt(sizes)
        feed(reading.layer.stock, reading.numbers(last))
        reading.trim_to(len(reading.text))


def test_a_layer_that_was_not_used_stays_empty():
    layer = SlidingCache(RotatingKVCache(5))
    for trees in (None, TreeBatch([make_tree([1, 2], [0, 0], 1)])):
        layer.expect(TreePass([3], trees))
        layer.trim_to(4)
        assert (layer.stock.keys, layer.stock.offset) == (None, 0)


def test_rows_that_no_window_reaches_are_dropped():
    window, size = 8, 24
    reading = Reading(window, random.Random(1))
    most = window + MAX_BEAM_LENGTH + -(-(BLOCK + size) // BLOCK) * BLOCK
    copies, keys = 0, None
    while len(reading.text) < 1000:
        reading.tree(size, 5)
        rows = reading.layer._rows
        assert rows.keys.shape[2] <= most
        copies += rows.keys is not keys
        keys = rows.keys
    assert copies <= len(reading.text) // 4
