"""The teacher cache against direct forward passes, and caches that must be refused."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.errors import CheckpointError, NonFiniteError
from mlx_redrafter.target.hooks import captured
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import teacher
from mlx_redrafter.training.files import fingerprint_weights
from mlx_redrafter.training.teacher import Teacher, read_sequences
from mlx_redrafter.training.teacher_cache import TeacherCache
from tests.helpers.calls import at_call
from tests.helpers.models import layer_inputs, tiny_llama
from tests.training.pieces import MODELS, kept_of, random_texts

K = 8
_sequences = partial(random_texts, given=2, seed=3)


@pytest.mark.parametrize("name", MODELS)
def test_cache_equals_a_direct_forward_pass(monkeypatch, name):
    monkeypatch.setattr(teacher, "MAX_CHUNK_TOKENS", 24)  # several chunks, several batches
    monkeypatch.setattr(teacher, "BATCH_SEQUENCES", 3)
    target = Target(MODELS[name]())
    sequences = _sequences([17, 3, 40, 9, 21])
    target.modules.watch((1, 2))
    shard = read_sequences(target, sequences, K, (1, 2))
    starts = np.array(shard.starts)
    assert starts.tolist() == [0, 17, 20, 60, 69, 90]
    for sequence, start in zip(sequences, starts, strict=False):
        where = slice(int(start), int(start) + len(sequence))
        with captured() as outputs:
            logits = target.model(mx.array(sequence.tokens)[None])[0]
        log_probs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        kept = kept_of(log_probs, K)
        assert np.array_equal(np.array(shard.tokens[where]), sequence.tokens)
        assert mx.array_equal(shard.top_ids[where], kept["top_ids"])
        np.testing.assert_allclose(
            np.array(shard.hidden[where]), np.array(outputs[-1][0]), rtol=2e-3, atol=1e-4
        )
        states = np.array(layer_inputs(target, mx.array(sequence.tokens), (1, 2)))
        np.testing.assert_allclose(np.array(shard.states[where]), states, rtol=2e-3, atol=1e-3)
        for part, tolerance in ("top_log_probs", (2e-3, 1e-4)), ("tail", (0, 2e-5)):
            found = np.array(vars(shard)[part][where])
            np.testing.assert_allclose(found, np.array(kept[part]), *tolerance)


def test_all_tokens_kept_leave_no_tail():
    shard = read_sequences(Target(tiny_llama()), _sequences([6]), 1000)
    assert shard.top_ids.shape == (6, 64)
    assert not np.array(shard.tail).any()


def test_no_shard_is_read_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "SHARD_TOKENS", 20)
    target = Target(tiny_llama())
    sequences = _sequences([12, 12, 12, 12, 5])
    cache = TeacherCache(tmp_path, {"target": fingerprint_weights(target.model)})
    done: list[int] = []
    target.modules.watch((0,))
    assert len(Teacher(target, cache, "train", K, ()).read(sequences, done.append)) == 3
    shared = cache.path("train", 0).stat().st_mtime_ns
    with_states = Teacher(target, cache, "train", K, (0,))
    with_states.read(sequences, lambda n: None)
    assert cache.path("train", 0).stat().st_mtime_ns == shared, "its outputs are kept"
    assert done == [24, 24, 5], "each shard in one pass"
    assert cache.num_shards("train") == 3
    first = cache.path("train", 0).read_bytes()
    cache.path("train", 1).unlink()
    calls: list[int] = []
    at_call(monkeypatch, teacher, "read_sequences", lambda _, texts, *__: calls.append(len(texts)))
    with_states.read(sequences, lambda n: None)
    assert len(calls) == 1
    assert cache.path("train", 0).read_bytes() == first
    states = cache.load("train", 1, (0,)).states
    assert states.shape[0] == 24


def test_a_run_goes_on_with_the_texts_of_its_cache(tmp_path, monkeypatch):
    """A chat template may write the day, and a run may end on another one."""
    target = Target(tiny_llama())
    target.modules.watch((0,))
    cache = TeacherCache(tmp_path, {})
    first, later = (random_texts([12, 9], seed=seed) for seed in (0, 1))
    Teacher(target, cache, "train", K, ()).read(first, lambda n: None)
    with monkeypatch.context() as patch:
        patch.setattr(teacher, "top_k", None)  # the shard has the logits
        (found,) = Teacher(target, cache, "train", K, (0,)).read(later, lambda n: None)
    for own, text in zip(found, first, strict=True):
        assert np.array_equal(own.tokens, text.tokens)
    states = read_sequences(target, first, K, (0,)).states
    assert mx.array_equal(cache.load("train", 0, (0,)).states, states)


def test_a_cache_of_another_target_is_refused(tmp_path):
    known, other = (fingerprint_weights(tiny_llama(seed=seed)) for seed in (0, 1))
    for _ in range(2):
        TeacherCache(tmp_path, {"target": known, "top_k": 8}).begin()
    with pytest.raises(CheckpointError, match="was made with another target: expected"):
        TeacherCache(tmp_path, {"target": other, "top_k": 8})
    with pytest.raises(CheckpointError, match="another top_k: expected 16, found 8"):
        TeacherCache(tmp_path, {"target": known, "top_k": 16})


def test_of_two_runs_one_begins_a_cache(tmp_path):
    """Both found no manifest, as a rehearsal lies between that and the first shard."""
    first, second = (TeacherCache(tmp_path, {"tokens": tokens}) for tokens in (1, 2))
    first.begin()
    with pytest.raises(CheckpointError, match="another tokens: expected 2, found 1"):
        second.begin()


def test_damaged_shards_are_named(tmp_path):
    cache = TeacherCache(tmp_path, {})
    cache.save("train", 0, read_sequences(Target(tiny_llama()), _sequences([6]), K))
    path = cache.path("train", 0)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="train-00000"):
        mx.eval(cache.load("train", 0).tail)


def test_fingerprints_tell_weights_apart():
    model = tiny_llama()
    before = fingerprint_weights(model)
    assert before == fingerprint_weights(tiny_llama())
    weight = model["model"]["layers"][0]["mlp"]["up_proj"].weight
    flat = np.array(weight)
    flat[0, 0], flat[0, 1] = flat[0, 1], flat[0, 0]  # the same sum
    model["model"]["layers"][0]["mlp"]["up_proj"].weight = mx.array(flat)
    assert fingerprint_weights(model) != before


@pytest.mark.parametrize("factor", [1e6, float("nan")])
def test_hidden_states_beyond_float16_are_refused(factor):
    model = tiny_llama()
    norm = model["model"]["norm"]
    norm.weight = norm.weight * factor
    with pytest.raises(NonFiniteError, match=r"within float16 .* cannot be used as a teacher"):
        read_sequences(Target(model), _sequences([6]), K)
