"""The drafter network against its equations in numpy.

Axes: W beams, H hidden size, V vocabulary.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.proposers.quantization import quantize_drafter
from mlx_redrafter.proposers.redrafter.network import MASKED_LOGIT
from tests.helpers.models import random_drafter
from tests.helpers.oracles import NumpyDrafter, silu

VOCAB_SIZE, HIDDEN_SIZE = 50, 8


@pytest.mark.parametrize("rnn", [True, False])
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("exit_dim", [16, 8, 24])
def test_network_follows_its_equations(rnn: bool, layers: int, exit_dim: int) -> None:
    drafter = random_drafter(
        VOCAB_SIZE, HIDDEN_SIZE, rnn=rnn, num_draft_layers=layers, exit_dim=exit_dim
    )
    literal = NumpyDrafter(drafter)
    rng = np.random.default_rng(layers)
    hidden = rng.standard_normal(HIDDEN_SIZE)
    embeddings = rng.standard_normal((4, 3, HIDDEN_SIZE))  # four tokens of three beams

    states = mx.concatenate(
        [
            drafter.start(drafter.project_input(mx.array(row[None].astype(np.float32))))
            for row in embeddings[0]
        ]
    )
    expected = [literal.advance(literal.start(), row) for row in embeddings[0]]
    for step in range(4):
        if step:
            rows = mx.array(embeddings[step].astype(np.float32))
            states = drafter.advance(states, drafter.project_input(rows))
            expected = [
                literal.advance(state, row)
                for state, row in zip(expected, embeddings[step], strict=True)
            ]
        log_probs = drafter.log_probs(mx.array(hidden.astype(np.float32)), states)
        truth = np.stack([literal.log_probs(hidden, state) for state in expected])
        np.testing.assert_allclose(np.array(log_probs), truth, rtol=1e-4, atol=1e-4)
    assert ("input_proj" in drafter) == (exit_dim != 2 * HIDDEN_SIZE)


def test_tensorrt_llms_recurrence_is_linear_and_starts_without_bias() -> None:
    drafter = random_drafter(
        VOCAB_SIZE, HIDDEN_SIZE, rnn_activation="identity", rnn_first_step_bias=False
    )
    weights = NumpyDrafter(drafter).weights
    e = np.random.default_rng(0).standard_normal((2, HIDDEN_SIZE))
    first = weights["rnn_w.weight"] @ e[0]
    second = weights["rnn_w.weight"] @ e[1] + weights["rnn_u.weight"] @ first
    second += weights["rnn_u.bias"]
    rows = [drafter.project_input(mx.array(row[None].astype(np.float32))) for row in e]
    state = drafter.start(rows[0])
    np.testing.assert_allclose(np.array(state)[0], first, rtol=1e-5, atol=1e-5)
    state = drafter.advance(state, rows[1])
    np.testing.assert_allclose(np.array(state)[0], second, rtol=1e-5, atol=1e-5)


def test_first_step_has_the_bias_by_default() -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    weights = NumpyDrafter(drafter).weights
    state = drafter.start(drafter.project_input(mx.zeros((1, HIDDEN_SIZE))))
    np.testing.assert_allclose(np.array(state)[0], silu(weights["rnn_u.bias"]), atol=1e-6)


def test_draft_top_k_masks_as_apples_warp_logits() -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, draft_top_k=3)
    state = mx.ones((2, HIDDEN_SIZE))
    hidden = mx.ones((HIDDEN_SIZE,))
    logits = np.array(drafter.logits(hidden, state), dtype=np.float64)
    found = np.array(drafter.log_probs(hidden, state))
    for row, log_probs in zip(logits, found, strict=True):
        kept = np.argsort(-row)[:3]
        warped = np.full(VOCAB_SIZE, MASKED_LOGIT)
        warped[kept] = row[kept] - row.max()
        expected = warped - np.log(np.exp(warped).sum())
        np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_log_probs_are_float32_and_normalised(dtype: mx.Dtype) -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, dtype=dtype)
    assert drafter.dtype == dtype
    state = drafter.start(mx.ones((1, HIDDEN_SIZE), dtype=dtype))
    log_probs = drafter.log_probs(mx.ones((HIDDEN_SIZE,), dtype=dtype), state)
    assert log_probs.dtype == mx.float32
    assert np.exp(np.array(log_probs, dtype=np.float64)).sum() == pytest.approx(1, abs=1e-5)


def test_rows_of_a_partial_head_are_tokens_of_its_list() -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, draft_vocab_size=4)
    drafter.token_ids = mx.array([9, 3, 40, 22], dtype=mx.int32)
    found = drafter.to_token_ids(mx.array([[3, 0], [1, 2]], dtype=mx.uint32))
    assert np.array(found).tolist() == [[22, 9], [3, 40]]
    whole = random_drafter(VOCAB_SIZE, HIDDEN_SIZE)
    assert whole.to_token_ids(mx.array([7], dtype=mx.uint32)).dtype == mx.int32


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("exit_dim", [128, 32])
@pytest.mark.parametrize("bits", [None, 3, 4, 8])
def test_constant_half_of_the_first_layer_changes_no_logits(
    layers: int, exit_dim: int, bits: int | None
) -> None:
    drafter = random_drafter(VOCAB_SIZE, 64, num_draft_layers=layers, exit_dim=exit_dim)
    if bits is not None:
        quantize_drafter(drafter, bits, 32)
    hidden, state = mx.random.normal((64,)), mx.random.normal((3, 64))
    share = drafter.hidden_term(hidden)
    assert share is not None
    expected = drafter.logits(hidden, state)
    np.testing.assert_allclose(
        np.array(drafter.logits(hidden, state, share)), np.array(expected), rtol=1e-4, atol=1e-4
    )


def test_constant_half_follows_new_weights() -> None:
    drafter = random_drafter(VOCAB_SIZE, HIDDEN_SIZE, seed=1)
    hidden, state = mx.random.normal((HIDDEN_SIZE,)), mx.random.normal((2, HIDDEN_SIZE))
    drafter.logits(hidden, state, drafter.hidden_term(hidden))
    drafter.update(random_drafter(VOCAB_SIZE, HIDDEN_SIZE, seed=2).parameters())
    np.testing.assert_allclose(
        np.array(drafter.logits(hidden, state, drafter.hidden_term(hidden))),
        np.array(drafter.logits(hidden, state)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_groups_of_quantised_weights_are_not_cut() -> None:
    drafter = random_drafter(VOCAB_SIZE, 48, exit_dim=32)
    quantize_drafter(drafter, 4, 32)
    assert drafter.hidden_term(mx.zeros((48,))) is None
