"""The scale of the drafter's scores against numpy, and what it is for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.beam import expand
from mlx_redrafter.calibration import SCALES, Text, fit_score_scale, predict
from mlx_redrafter.config import TreeShape
from mlx_redrafter.drafter import Drafter
from tests.helpers.models import random_drafter

VOCAB_SIZE, HIDDEN_SIZE = 30, 8


def _embed(tokens: mx.array) -> mx.array:
    return mx.random.normal((VOCAB_SIZE, HIDDEN_SIZE), key=mx.random.key(5))[tokens]


def _text(drafter: Drafter, length: int, sharpness: float, seed: int = 0) -> Text:
    """A text whose choices are drawn from the drafter's own first drafts, sharpened."""
    keys = mx.random.split(mx.random.key(seed), 3)
    tokens = mx.random.randint(0, VOCAB_SIZE, (length,), key=keys[0])
    hiddens = mx.random.normal((length, HIDDEN_SIZE), key=keys[1])
    blank = Text(tokens, hiddens, mx.zeros((length,), dtype=mx.int32))
    logits = predict(drafter, _embed, blank)[0].logits
    rows = mx.random.categorical(sharpness * logits, key=keys[2])
    chosen = mx.concatenate([mx.zeros((1,), dtype=mx.int32), drafter.to_token_ids(rows)])
    return Text(tokens, hiddens, chosen)


def _nats(drafter: Drafter, text: Text, scale: float) -> float:
    total = 0.0
    for logits, chosen in predict(drafter, _embed, text):
        rows = np.array(logits, dtype=np.float64) * scale
        ids = np.array(drafter.to_token_ids(mx.arange(rows.shape[1]))).tolist()
        for row, token in zip(rows, np.array(chosen).tolist(), strict=True):
            if token in ids:
                total += np.log(np.exp(row).sum()) - row[ids.index(token)]
    return total


@pytest.mark.parametrize("draft_vocab", [None, 12])
@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_fitted_scale_is_the_most_likely_one(sharpness: float, draft_vocab: int | None) -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, draft_vocab_size=draft_vocab)
    # Longer than a batch, whose seams leave out a few predictions.
    text = _text(drafter, 100, sharpness)
    found = fit_score_scale(drafter, _embed, [text])
    assert found == min(SCALES, key=lambda scale: _nats(drafter, text, scale))


def test_sharper_head_gets_the_smaller_scale() -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    text = _text(drafter, 100, 8.0)
    drafter.lm_head[-1].weight = drafter.lm_head[-1].weight / 4
    before = fit_score_scale(drafter, _embed, [text])
    drafter.lm_head[-1].weight = 2 * drafter.lm_head[-1].weight
    assert SCALES[0] < fit_score_scale(drafter, _embed, [text]) == before / 2


def test_without_texts_nothing_is_scaled() -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    short = Text(mx.zeros((2,), dtype=mx.int32), mx.zeros((2, HIDDEN_SIZE)), mx.zeros((2,)))
    assert fit_score_scale(drafter, _embed, [short]) == 1.0


def test_scale_ranks_drafts_of_greedy_targets_only() -> None:
    scaled = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, score_scale=3.0)
    plain = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    hidden, root = mx.random.normal((HIDDEN_SIZE,), key=mx.random.key(1)), mx.array([4])
    shape = TreeShape(2, 3)
    found = expand(scaled, _embed, hidden, root, shape)
    embedded = _embed(root)
    expected = 3 * plain.logits(hidden, plain.start(embedded))
    expected = expected - mx.logsumexp(expected)
    best = mx.sort(expected.flatten())[::-1][:2]
    np.testing.assert_allclose(np.array(found.scores[:2]), np.array(best), rtol=1e-4)
    noisy = [expand(d, _embed, hidden, root, shape, lambda x, depth: x) for d in (scaled, plain)]
    np.testing.assert_array_equal(np.array(noisy[0].scores), np.array(noisy[1].scores))
