"""Noise that a sampled text may have been sampled with."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.training.generated_texts import sample_posterior_noise
from mlx_redrafter.training.teacher_cache import Shard

V, TEMP = 7, 0.8


def _shard(log_probs: np.ndarray, tokens: np.ndarray, k: int) -> Shard:
    """Texts of which the target knew these log-probabilities, shape (n, V)."""
    ids = np.argsort(-log_probs, axis=-1)[:, :k]
    kept = np.take_along_axis(log_probs, ids, -1)
    n = len(tokens)
    return Shard(
        tokens=mx.array(tokens.astype(np.int32)),
        is_trained=mx.ones((n,), dtype=mx.bool_),
        starts=mx.array([0, n]),
        hidden=mx.zeros((n, 2), dtype=mx.float16),
        top_ids=mx.array(ids.astype(np.int32)),
        top_log_probs=mx.array(kept.astype(np.float32)),
        tail=mx.array(np.maximum(0, 1 - np.exp(kept).sum(-1)).astype(np.float32)),
    )


def _log_probs(n: int) -> np.ndarray:
    logits = np.repeat(np.random.default_rng(1).normal(size=(1, V)) * 2, n, axis=0)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("k", [3, V])
def test_under_it_the_target_chooses_the_text(k: int) -> None:
    log_probs = _log_probs(400)
    tokens = np.random.default_rng(2).integers(0, V, 400)
    shard = _shard(log_probs, tokens, k)
    noise = np.array(sample_posterior_noise(shard, mx.arange(399), V, TEMP))
    if k < V:  # the others share what is left
        others = np.argsort(-log_probs[0])[k:]
        left = np.log(np.exp(log_probs[0, others]).sum() / len(others))
        log_probs[:, others] = left
    np.testing.assert_array_equal(np.argmax(log_probs[:-1] / TEMP + noise, axis=-1), tokens[1:])


def test_over_the_texts_that_the_target_samples_it_is_gumbel_noise() -> None:
    n = 20_000
    log_probs = _log_probs(n)
    own = np.random.default_rng(3).gumbel(size=(n, V))
    tokens = np.roll(np.argmax(log_probs / TEMP + own, axis=-1), 1)
    noise = np.array(
        sample_posterior_noise(_shard(log_probs, tokens, V), mx.arange(n - 1), V, TEMP)
    )
    np.testing.assert_allclose(noise.mean(0), np.euler_gamma, atol=0.05)
    np.testing.assert_allclose(noise.std(0), np.pi / np.sqrt(6), atol=0.05)
    off_diagonal = np.corrcoef(noise.T) - np.eye(V)
    assert np.abs(off_diagonal).max() < 0.04


def test_a_row_depends_on_its_state_alone() -> None:
    tokens = np.arange(20) % V
    shard = _shard(_log_probs(20), tokens, V)
    all_rows = sample_posterior_noise(shard, mx.arange(19), V, TEMP)
    some = sample_posterior_noise(shard, mx.array([4, 11]), V, TEMP)
    assert mx.array_equal(some, all_rows[mx.array([4, 11])]).item()
    other = sample_posterior_noise(shard, mx.array([4, 11]), V, TEMP, seed=1)
    assert not mx.any(other == some).item()
