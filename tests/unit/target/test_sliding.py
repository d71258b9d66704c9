"""Which tokens the nodes of trees see through a window, and what mlx-lm's ring holds afterwards.

Every token and node has a number, which is its key and its value, so that what a node sees is a
set of numbers. Axes: W tokens of the window.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH
from mlx_redrafter.target import few_shapes
from mlx_redrafter.target.caches.sliding import SlidingCache
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.caches.tree_pass import TreePass
from mlx_redrafter.trees.tree import TreeBatch
from tests.helpers.drafts import make_tree

BLOCK = 16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are full, and copied, after few tokens."""
    monkeypatch.setattr(ChunkedKVCache, "step", BLOCK)
    monkeypatch.setattr(few_shapes, "BUCKET", BLOCK)


def feed(layer: RotatingKVCache | SlidingCache, numbers: Sequence[int]) -> list[list[int]]:
    """Give a layer the rows of one forward pass; what each of its tokens sees, in order."""
    mask = layer.make_mask(len(numbers), return_array=True)
    rows = mx.array(numbers, dtype=mx.float32).reshape(1, 1, -1, 1)
    keys, values = layer.update_and_fetch(rows, -rows)
    assert mx.array_equal(keys, -values)
    # What layers that share these rows get.
    assert all(map(mx.array_equal, layer.keys_and_values(), (keys, values)))
    if mask is None:
        mask = mx.ones((len(numbers), keys.shape[2]), dtype=mx.bool_)
    assert isinstance(mask, mx.array)
    mask = mask.reshape(mask.shape[-2:])
    assert mask.shape == (len(numbers), keys.shape[2])
    found = [int(number) for number in keys.reshape(-1).tolist()]
    return [
        [n for n, is_seen in zip(found, row, strict=True) if is_seen]
        for row in mask.tolist()  # type: ignore[union-attr]
    ]


def read(ring: RotatingKVCache, numbers: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
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
        self.next = 1

    def numbers(self, count: int) -> list[int]:
        """Numbers of new tokens."""
        self.next += count
        return list(range(self.next - count, self.next))

    def prompt(self, sizes: Sequence[int]) -> None:
        """Read chunks, as mlx-lm does."""
        numbers = self.numbers(sum(sizes))
        read(self.layer.stock, numbers, sizes)
        self.text += numbers
        self.cache.length += len(numbers)

    def token(self) -> None:
        """Read one token."""
        (number,) = self.numbers(1)
        self.cache.expect(None)
        (seen,) = feed(self.layer, [number])
        self.cache.length += 1
        self.text.append(number)
        assert sorted(seen) == self.text[-self.window :]

    def tree(self, size: int, depth: int, is_kept: bool = True) -> None:
        """Read a tree and keep a path of it."""
        parents, depths = [0], [0]
        while len(parents) < size:
            parent = self.rng.choice([n for n in range(len(parents)) if depths[n] < depth])
            parents.append(parent)
            depths.append(depths[parent] + 1)
        numbers, paths = self.numbers(size), [[0]]
        for node in range(1, size):
            paths.append([*paths[parents[node]], node])
        self.cache.expect(make_tree(numbers, parents, depth))
        for path, seen in zip(paths, feed(self.layer, numbers), strict=True):
            text = [*self.text, *(numbers[node] for node in path)]
            assert seen == text[-self.window :]
        if is_kept:
            path = self.rng.choice(paths)
            self.cache.commit(path)
            self.text += [numbers[node] for node in path]

    def trim_to(self, length: int) -> None:
        """End the text after ``length`` tokens; mlx-lm's ring goes on as one that read it."""
        self.cache.trim_to(length)
        del self.text[length:]
        sizes = [self.rng.choice([1, 1, 1, 2, 5]) for _ in range(2 * self.window)]
        reference = RotatingKVCache(self.window)
        read(reference, self.text, [1] * length)
        stock = self.layer.stock
        assert (stock.offset, stock.size()) == (reference.offset, reference.size())
        numbers = self.numbers(sum(sizes))
        assert read(stock, numbers, sizes) == read(reference, numbers, sizes)


@given(
    seed=st.integers(0, 10**6),
    window=st.integers(1, 12),
    prompt=st.lists(st.integers(1, 20), max_size=3),
    steps=st.integers(0, 30),
    has_buckets=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_steps_see_what_single_tokens_do(
    seed: int, window: int, prompt: list[int], steps: int, has_buckets: bool
) -> None:
    rng = random.Random(seed)
    reading = Reading(window, rng, has_buckets)
    reading.prompt(prompt)
    for _ in range(steps):
        if rng.random() < 0.3:
            reading.token()
        else:
            reading.tree(rng.randint(2, 24), rng.randint(1, MAX_BEAM_LENGTH - 1))
    reading.trim_to(len(reading.text))


@pytest.mark.parametrize("window", [1, 3, 8, 40])
@pytest.mark.parametrize("prompt", [[1], [3, 4], [8], [30], [30, 1, 1, 1]])
@pytest.mark.parametrize("has_buckets", [False, True])
def test_a_text_ends_anywhere_in_its_newest_path(
    window: int, prompt: list[int], has_buckets: bool
) -> None:
    for number, back in enumerate((0, 0, 1, 2, 7, 7, MAX_BEAM_LENGTH - 1)):
        reading = Reading(window, random.Random(back), has_buckets)
        reading.prompt(prompt)
        for _ in range(3):
            reading.tree(9, 4)
        chain = reading.numbers(MAX_BEAM_LENGTH)
        reading.cache.expect(make_tree(chain, [max(0, n - 1) for n in range(16)], 15))
        feed(reading.layer, chain)
        reading.cache.commit(range(16))
        reading.text += chain
        if number % 2:  # followed by a tree in flight for which the buffer is too small
            reading.tree(4 * BLOCK, 4, is_kept=False)
        reading.trim_to(len(reading.text) - back)


@pytest.mark.parametrize("window", [1, 3, 8, 40])
@pytest.mark.parametrize("sizes", [[1], [5], [1, 1], [8, 8], [30], [30, 1]])
def test_a_pass_that_was_interrupted_is_forgotten(window: int, sizes: list[int]) -> None:
    """The layers before the interruption have read its tokens already."""
    for last in (1, 2, 20):
        reading = Reading(window, random.Random(last))
        reading.prompt(sizes)
        feed(reading.layer.stock, reading.numbers(last))
        reading.trim_to(len(reading.text))


def test_a_ring_without_trees_is_left_alone() -> None:
    reading = Reading(5, random.Random(0))
    reading.prompt([9, 1])
    reading.token()
    ring = reading.layer.stock
    before = ring.keys, ring.values, ring.offset, ring._idx
    reading.cache.trim_to(11)
    after = ring.keys, ring.values, ring.offset, ring._idx
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_a_layer_that_was_not_used_stays_empty() -> None:
    layer = SlidingCache(RotatingKVCache(5))
    for trees in (None, TreeBatch([make_tree([1, 2], [0, 0], 1)])):
        layer.expect(TreePass([3], trees))
        layer.trim_to(4)
        assert layer.stock.keys is None
        assert layer.stock.offset == 0


def test_rows_that_no_window_reaches_are_dropped() -> None:
    window, size = 8, 24
    reading = Reading(window, random.Random(1))
    most = window + MAX_BEAM_LENGTH + -(-(BLOCK + size) // BLOCK) * BLOCK
    copies, keys = 0, None
    while len(reading.text) < 1000:
        reading.tree(size, 5)
        rows = reading.layer._rows
        assert rows.keys is not None
        assert rows.keys.shape[2] <= most
        copies += rows.keys is not keys
        keys = rows.keys
    assert copies <= len(reading.text) // 4
