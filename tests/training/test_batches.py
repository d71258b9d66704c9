"""Batches: the drafts that count, and every position once per epoch in a reproducible order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_redrafter.device_read import to_floats
from mlx_redrafter.errors import ConfigError, DataError
from mlx_redrafter.training import batches
from mlx_redrafter.training.batches import BatchOptions, BatchOrder, map_to_rows
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.initial import choose_slice, select_frequent_tokens
from mlx_redrafter.training.loss import IMPOSSIBLE, Distribution, divergence
from mlx_redrafter.training.teacher_cache import (
    Shard,
    TeacherCache,
    find_draftable_steps,
    pack_sequences,
)
from mlx_redrafter.training_options import Head, NetworkOptions
from tests.training.pieces import sequence

H, K, L = 2, 2, 3


def _shard(sequences: list[TokenSequence], first: int) -> Shard:
    """Values that tell where they come from: the number of the position, from ``first`` on."""
    count = sum(map(len, sequences))
    numbers = np.arange(first, first + count)
    return Shard(
        **pack_sequences(sequences),
        hidden=mx.array(np.stack([numbers, -numbers], axis=1).astype(np.float16)),
        top_ids=mx.array(np.stack([numbers, numbers + 1], axis=1).astype(np.int32)),
        top_log_probs=mx.array((-numbers[:, None] / np.array([1, 2])).astype(np.float16)),
        tail=mx.array(numbers.astype(np.float32)),
    )


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4),
    st.integers(2, 5),
)
def test_windows_are_whole_written_stretches(texts, length):
    trained = np.array([flag for text in texts for flag in text], dtype=np.bool_)
    starts = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    shard = _shard([sequence(range(len(trained)))], 0)
    shard = replace(shard, is_trained=mx.array(trained), starts=mx.array(starts))
    found = find_draftable_steps(shard, length)
    for text, start in zip(texts, starts, strict=False):
        for t in range(len(text)):
            for step in range(length - 1):
                stretch = text[t + 1 : t + 3 + step]
                expected = len(stretch) == 2 + step and all(stretch)
                assert found[start + t, step] == expected


@pytest.fixture
def cache(tmp_path: Path) -> TeacherCache:
    cache = TeacherCache(tmp_path, {"target": "none"})
    cache.save("train", 0, _shard([sequence(range(100, 105), 1), sequence(range(105, 107))], 0))
    cache.save("train", 1, _shard([sequence(range(107, 116))], 7))
    cache.save("train", 2, _shard([sequence(range(116, 119), 3)], 16))  # nothing to learn
    return cache


def test_every_position_once_per_epoch_with_its_own_neighbours(cache, monkeypatch):
    monkeypatch.setattr(batches, "GROUP_BYTES", 1)  # each shard for itself
    order = BatchOrder(cache, "train", BatchOptions(L, 4, seed=1))
    assert sum(order.counts) == 3 + 7
    assert order.steps_per_epoch == 1 + 2
    seen: list[int] = []
    for batch in map(order.batch, range(order.steps_per_epoch)):
        for row in range(4):
            weights = np.array(batch.weights[row])
            if not weights.any():
                continue
            here = round(to_floats(batch.states[row, :1])[0])
            seen.append(here)
            for step in np.flatnonzero(weights):
                assert batch.tokens[row, step + 1].item() == 100 + here + 2 + step
                assert batch.top_ids[row, step, 0].item() == here + 1 + step
                assert batch.tail[row, step].item() == here + 1 + step
    assert sorted(seen) == [0, 1, 2, *range(7, 14)]


def test_a_share_of_the_positions_drafts_in_an_epoch(cache):
    order = BatchOrder(cache, "train", BatchOptions(L, 5, seed=1, share=1 / 3))
    assert order.steps_per_epoch == 2, "as without a share"
    for turn in range(2):
        seen: list[int] = []
        for batch in map(order.batch, range(6 * turn, 6 * turn + 6)):
            assert batch.states.shape[0] == 2
            used = np.array(batch.weights).any(axis=1)
            seen += np.array(batch.states[:, 0])[used].round().astype(int).tolist()
        assert sorted(seen) == [0, 1, 2, *range(7, 14)]


def test_anchors_are_drawn_among_the_positions_that_teach(tmp_path):
    cache = TeacherCache(tmp_path, {"target": "none"})
    cache.save("train", 0, _shard([sequence(range(100, 116), 7), sequence(range(116, 132))], 0))
    order = BatchOrder(cache, "train", BatchOptions(L, 32, 1, stretch=16, share=3 / 16))
    drawn = set()
    for batch in map(order.batch, range(8)):
        assert batch.states.shape[0] == 32
        for number in range(2):
            part = batch.part(number, 2)
            anchors = np.array(part.anchors)
            assert sorted(set(anchors.tolist())) == anchors.tolist()
            here = np.array(part.states[:, 0])[anchors].round().astype(int)
            assert np.array(part.tokens[:, 0]).tolist() == (101 + here).tolist()
            assert np.array(part.weights).any(axis=1).all()
            drawn |= set(here.tolist())
    assert len(drawn) > 12


def test_order_depends_on_seed_and_step_alone(cache):
    options = BatchOptions(L, 4, seed=1)
    steps = list(map(BatchOrder(cache, "train", options).batch, range(6)))
    late = BatchOrder(cache, "train", options).batch(5)
    assert all(mx.array_equal(a, b).item() for a, b in zip(steps[5], late, strict=True))
    other = BatchOrder(cache, "train", options._replace(seed=2)).batch(0)
    assert not mx.array_equal(steps[0].states, other.states).item()


def test_a_group_mixes_distant_shards(tmp_path, monkeypatch):
    cache = TeacherCache(tmp_path, {"target": "none"})
    shards = [_shard([sequence(range(9))], 0) for _ in range(12)]
    for number, shard in enumerate(shards):
        cache.save("train", number, shard)
    size = sum(array.nbytes for array in shards[0].arrays().values())
    monkeypatch.setattr(batches, "GROUP_BYTES", 4 * size)
    groups = BatchOrder(cache, "train", BatchOptions(L, 4, seed=1)).groups
    assert sorted(number for group in groups for number in group) == list(range(12))
    assert [len(group) for group in groups] == [4, 4, 4]
    assert all(max(group) - min(group) > 3 for group in groups)


def test_inputs_of_layers_fill_groups(tmp_path, monkeypatch):
    cache = TeacherCache(tmp_path, {"target": "none"})
    shard = _shard([sequence(range(9))], 0)
    for number in range(4):
        states = mx.zeros((9, 3 * H), mx.float16)
        cache.save("train", number, replace(shard, states=states), layers=(0, 1, 2))
    plain = sum(array.nbytes for array in shard.arrays().values())
    monkeypatch.setattr(batches, "GROUP_BYTES", 4 * plain)
    for layers, count in (((), 1), ((0, 1, 2), 2)):
        assert len(BatchOrder(cache, "train", BatchOptions(L, 4, 1, layers=layers)).groups) == count


def test_tokens_without_a_row_join_the_tail():
    log_probs = mx.log(mx.array([[0.5, 0.25, 0.125]]))
    ids, kept, tail = map_to_rows(mx.array([[1, -1, 0]]), log_probs, mx.array([0.125]))
    assert ids.tolist() == [[1, 0, 0]]
    assert kept[0, 1].item() == IMPOSSIBLE
    assert tail.item() == pytest.approx(0.375)
    # Two rows and the rest are left.
    found = divergence(Distribution.of(mx.array([[0.3, -0.2, 0.1]])), ids, kept, tail)
    whole = np.array([[0.3, -0.2, 0.1]])
    log_q = whole - np.log(np.exp(whole).sum())
    expected = sum(p * (np.log(p) - log_q[0, i]) for p, i in ((0.5, 1), (0.125, 0), (0.375, 2)))
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_the_most_frequent_tokens_are_kept():
    text, prompt = sequence([5, 5, 3, 3, 3, 2]), sequence([6] * 9 + [5], 9)
    assert select_frequent_tokens([text], [7], 3, 8).tolist() == [3, 5, 7]
    assert select_frequent_tokens([prompt, text], [7], 3, 8).tolist() == [3, 5, 7]
    assert select_frequent_tokens([prompt, text], [7], 5, 8).tolist() == [2, 3, 5, 6, 7]


def test_a_large_vocabulary_is_sliced():
    def choose(vocab_size: int, head: Head = "redrafter", **values: Any) -> int | None:
        return choose_slice(NetworkOptions(head, **values), vocab_size, 17).draft_vocab

    assert [choose(n) for n in (16383, 16384, 49152, 128256)] == [None, 8192, 8192, 16032]
    assert choose(49152, "medusa") == 8192
    assert choose(49152, "dspark") is None, "its head is the model's"
    assert choose(49152, draft_vocab=49152) is None
    assert choose(49152, draft_vocab=18) == 18
    for count in (17, 49153):
        with pytest.raises(ConfigError, match=f"from 18, .* to its 49152 tokens, got {count}"):
            choose(49152, draft_vocab=count)


def test_too_short_texts_are_refused(tmp_path):
    cache = TeacherCache(tmp_path, {})
    cache.save("train", 0, _shard([sequence(range(2))], 0))
    with pytest.raises(DataError, match="expected texts of more than 3 tokens"):
        BatchOrder(cache, "train", BatchOptions(L, 4, seed=1))
