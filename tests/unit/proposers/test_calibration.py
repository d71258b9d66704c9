"""The scale of the drafter's scores against numpy, and what it is for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.fit import SCALES, Calibration, ReadSequence
from mlx_redrafter.proposers.redrafter.fit_drafter import calibrate, predict
from mlx_redrafter.proposers.redrafter.network import Drafter
from tests.helpers.models import random_drafter
from tests.helpers.recurrent_search import expand

VOCAB_SIZE, HIDDEN_SIZE = 30, 8


def _embed(tokens: mx.array) -> mx.array:
    return mx.random.normal((VOCAB_SIZE, HIDDEN_SIZE), key=mx.random.key(5))[tokens]


def _text(drafter: Drafter, length: int, sharpness: float, seed: int = 0) -> ReadSequence:
    """A text whose target samples the drafter's own first drafts, sharpened.

    ``top_ids`` are in no order but the first, which is drawn: a greedy target that nobody can
    predict better.
    """
    keys = mx.random.split(mx.random.key(seed), 3)
    tokens = mx.random.randint(0, VOCAB_SIZE, (length,), key=keys[0])
    hidden_states = mx.random.normal((length, HIDDEN_SIZE), key=keys[1])
    nothing = mx.zeros((length, 1), dtype=mx.int32)
    text = ReadSequence(_after_prompt(tokens), 1, hidden_states, nothing, nothing)
    logits = sharpness * predict(drafter, _embed, text)[0].logits
    first = mx.random.categorical(logits, key=keys[2])[:, None]
    rows = mx.broadcast_to(mx.arange(logits.shape[1]), logits.shape)
    rows = mx.where(rows == first, rows[:, :1], mx.where(rows == 0, first, rows))
    log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    log_probs = mx.take_along_axis(log_probs, rows, axis=-1)
    ids = drafter.to_token_ids(rows)
    return text._replace(
        top_ids=mx.concatenate([ids[:1], ids]),
        top_log_probs=mx.concatenate([log_probs[:1], log_probs]),
    )


def _after_prompt(tokens: mx.array) -> mx.array:
    return mx.concatenate([mx.zeros((1,), dtype=tokens.dtype), tokens])


def _nats(drafter: Drafter, text: ReadSequence, scale: float) -> float:
    total = 0.0
    for prediction in predict(drafter, _embed, text):
        rows = np.array(prediction.logits, dtype=np.float64) * scale
        ids = np.array(drafter.to_token_ids(mx.arange(rows.shape[1]))).tolist()
        for row, token in zip(rows, np.array(prediction.chosen).tolist(), strict=True):
            if token in ids:
                total += np.log(np.exp(row).sum()) - row[ids.index(token)]
    return total


@pytest.mark.parametrize("draft_vocab", [None, 12])
@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_fitted_scale_is_the_most_likely_one(sharpness: float, draft_vocab: int | None) -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, draft_vocab_size=draft_vocab)
    # Longer than a batch, whose seams leave out a few predictions.
    text = _text(drafter, 100, sharpness)
    found = calibrate(drafter, _embed, [text])
    assert found.inverse_temperature == min(SCALES, key=lambda scale: _nats(drafter, text, scale))


def test_sharper_head_gets_the_smaller_scale() -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    text = _text(drafter, 100, 8.0)
    drafter.lm_head[-1].weight = drafter.lm_head[-1].weight / 4
    before = calibrate(drafter, _embed, [text]).inverse_temperature
    drafter.lm_head[-1].weight = 2 * drafter.lm_head[-1].weight
    after = calibrate(drafter, _embed, [text]).inverse_temperature
    assert SCALES[0] < after == before / 2


def test_a_drafter_that_knows_the_distribution_gets_all_of_the_noise() -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    for flatness in (1, 3):  # one that is too flat gets less
        drafter.lm_head[-1].weight = flatness * drafter.lm_head[-1].weight
        texts = [_text(drafter, 200, 1.0, seed) for seed in range(3)]
        drafter.lm_head[-1].weight = drafter.lm_head[-1].weight / flatness
        weight = calibrate(drafter, _embed, texts).coupling_weight
        assert weight >= 0.9 if flatness == 1 else weight < 0.7
    empty = texts[0]._replace(tokens=texts[0].tokens[:3], states=mx.zeros((2, HIDDEN_SIZE)))
    assert calibrate(drafter, _embed, [empty]) == Calibration(1.0, 0.5), "nothing is fitted"


def test_scale_ranks_drafts_of_greedy_targets_only() -> None:
    scaled = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, inverse_temperature=3.0)
    plain = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    hidden, root = mx.random.normal((HIDDEN_SIZE,), key=mx.random.key(1)), mx.array([4])
    shape = DraftShape(2, 3)
    found = expand(scaled, _embed, hidden, root, shape)
    state = plain.start(plain.project_input(_embed(root)))
    expected = 3 * plain.logits(hidden, state)
    expected = expected - mx.logsumexp(expected)
    best = mx.sort(expected.flatten())[::-1][:2]
    np.testing.assert_allclose(np.array(found.scores[:2]), np.array(best), rtol=1e-4)
    noisy = [
        expand(drafter, _embed, hidden, root, shape, lambda x, depth: x)
        for drafter in (scaled, plain)
    ]
    np.testing.assert_array_equal(np.array(noisy[0].scores), np.array(noisy[1].scores))
