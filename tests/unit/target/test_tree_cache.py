"""The tree cache: what it holds after commits, interruptions and trimming.

Axes: N nodes of a tree.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_redrafter.bench.lab.contexts import prefill
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from tests.helpers.drafts import grow, make_tree
from tests.helpers.models import tiny_llama, tiny_qwen3
from tests.helpers.oracles import paths_of

VOCAB_SIZE = 64
PLAN = DraftPlan.of(4, 5, 9)


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


def _random_path(rng: random.Random, parents: list[int]) -> list[int]:
    node = rng.randrange(len(parents))
    path = [node]
    while path[-1]:
        path.append(parents[path[-1]])
    return path[::-1]


@given(seed=st.integers(0, 10**6), steps=st.integers(1, 6))
@settings(max_examples=25)
def test_committed_rows_are_those_of_a_plain_prefill(target: Target, seed: int, steps: int) -> None:
    """After trees and plain tokens, the end of a path forgotten or a tree in flight."""
    rng = random.Random(seed)
    text = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 9))]
    cache = target.caches.new()
    prefill(target, mx.array(text), cache, 4)
    for _ in range(steps):
        root = rng.randrange(VOCAB_SIZE)
        if rng.random() < 0.2:
            target.advance(mx.array([root]), cache)
            text.append(root)
            path = [0]
            continue
        tokens, parents = grow(rng, root, [], PLAN, VOCAB_SIZE, accuracy=0)
        path = _random_path(rng, parents)
        _decode_tree(target, cache, tokens, parents, path)
        text += [tokens[node] for node in path]
        assert cache.length == len(text)
    if rng.random() < 0.3:
        target.verify(make_tree([7, 8, 9], [0, 0, 0], 1), cache)
        text.append(7)  # the root of a tree in flight is kept
    else:
        del text[len(text) - rng.randrange(len(path)) :]
    cache.trim_to(len(text))
    assert_same_rows(cache.stock, prefilled(target.model, text))


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3])
def test_every_node_is_scored_as_if_decoded_alone(build: Any) -> None:
    model = build(seed=2)
    target = Target(model)
    rng = random.Random(3)
    text = [5, 9, 11, 40]
    cache = target.caches.new()
    prefill(target, mx.array(text), cache, 512)
    for _ in range(3):  # the second and third trees also write the rows of a path
        tokens, parents = grow(rng, 7, [], DraftPlan.of(4, 5, 20), VOCAB_SIZE, accuracy=0)
        tree = make_tree(tokens, parents, 4)
        logits = np.array(target.verify(tree, cache).logits)
        for node, path in enumerate(paths_of(tokens, parents)):
            history = [*text, *path]
            alone = np.array(model(mx.array([history]))[0, -1])
            np.testing.assert_allclose(logits[node], alone, atol=1e-4, rtol=0)
        nodes = _random_path(rng, parents)
        cache.commit(nodes)
        text += [tokens[n] for n in nodes]


def test_rows_allocated_stay_within_one_block_of_plain_decoding(target: Target) -> None:
    """At most plain decoding's rows + N + L, rounded up to one block of 256."""
    block = KVCache.step
    nodes, length = 9, 5
    cache, plain = target.caches.new(), target.caches.new()
    rng = random.Random(0)
    prefill(target, mx.array([1, 2, 3]), cache, 512)
    prefill(target, mx.array([1, 2, 3]), plain, 512)
    while cache.length < 2 * block:
        tokens, parents = grow(rng, 7, [], PLAN, VOCAB_SIZE, accuracy=0)
        path = _random_path(rng, parents)
        _decode_tree(target, cache, tokens, parents, path)
        for _ in path:
            target.advance(mx.array([7]), plain)
        for layer, reference in zip(cache.stock, plain.stock, strict=True):
            extra = -(-(nodes + length) // block) * block
            assert layer.keys.shape[2] <= reference.keys.shape[2] + extra


def test_buffers_go_with_the_request(target: Target) -> None:
    cache = target.caches.new()
    prefill(target, mx.array([1, 2, 3]), cache, 512)
    _decode_tree(target, cache, [4, 5], [0, 0], [0, 1])
    layer = weakref.ref(cache.layers[0])
    gc.disable()
    try:
        del cache
        assert layer() is None
    finally:
        gc.enable()
