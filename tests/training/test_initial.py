"""The weights training starts from."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.hooks import captured_output
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import NetworkOptions, compute_head_matrix, new_student
from tests.helpers.models import quantize_wide, tiny_llama, tiny_qwen3


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_head_matrix_gives_the_targets_logits(bits: int | None, is_tied: bool) -> None:
    model = tiny_qwen3() if is_tied else tiny_llama()
    if bits is not None:
        quantize_wide(model, bits=bits)
    target = Target(model)
    with captured_output() as outputs:
        logits = model(mx.array([[1, 2, 3]]))
    head = compute_head_matrix(target)
    assert head is not None
    np.testing.assert_allclose(
        np.array(outputs[-1][0] @ head.T), np.array(logits[0]), rtol=1e-3, atol=1e-3
    )


def _drafter(target: Target, options: NetworkOptions, head: mx.array | None, seed: int) -> Drafter:
    student = new_student(target, options)
    student.initialise(head, seed)
    drafter: Drafter = student.network
    return drafter


def test_a_wide_head_holds_the_targets_and_blocks_do_nothing() -> None:
    target = Target(tiny_llama())
    head = compute_head_matrix(target)
    assert head is not None
    drafter = _drafter(target, NetworkOptions(), head, seed=0)
    assert drafter.config.exit_dim == 64
    assert not drafter.config.has_input_proj
    x = mx.random.normal((3, 64))
    assert mx.array_equal(drafter.lm_head[0](x), x).item()
    assert mx.array_equal(drafter.lm_head[-1].weight[:, :32], head).item()


def test_a_narrow_head_is_the_nearest_of_its_rank() -> None:
    target = Target(tiny_llama())
    head = compute_head_matrix(target)
    assert head is not None
    drafter = _drafter(target, NetworkOptions(exit_dim=8), head, seed=0)
    assert drafter.config.has_input_proj
    weight = np.array(drafter.lm_head[-1].weight)
    full = np.array(head)
    left, values, _ = np.linalg.svd(full, full_matrices=False)
    # Its columns span the leading left singular vectors, with their lengths.
    projected = left[:, :8] @ (left[:, :8].T @ weight)
    np.testing.assert_allclose(projected, weight, atol=1e-3)
    np.testing.assert_allclose(np.linalg.svd(weight)[1], values[:8], rtol=1e-3)


def test_the_seed_decides() -> None:
    target, options = Target(tiny_llama()), NetworkOptions(exit_dim=8)
    first, again, other = (_drafter(target, options, None, seed) for seed in (1, 1, 2))
    assert mx.array_equal(first.rnn_w.weight, again.rnn_w.weight).item()
    assert not mx.array_equal(first.rnn_w.weight, other.rnn_w.weight).item()
