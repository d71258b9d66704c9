"""`top_k` against a stable sort of the whole row."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mlx_redrafter.decoding.sampling import block_size, top_k


def _check(scores: np.ndarray, k: int) -> None:
    values, indices = top_k(mx.array(scores), k)
    expected = np.argsort(-scores, axis=-1, kind="stable")[:, :k]
    assert np.array_equal(np.array(indices), expected)
    assert np.array_equal(
        np.array(values), np.take_along_axis(scores, expected, axis=-1), equal_nan=False
    )


@pytest.mark.parametrize("size", [3, 255, 256, 257, 1023, 1024, 1025, 5000, 50257])
@pytest.mark.parametrize("k", [1, 2, 3, 16, 64])
def test_continuous_scores(size: int, k: int) -> None:
    scores = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
    _check(scores, min(k, size))


@pytest.mark.parametrize("size", [300, 1024, 4097, 50257])
@pytest.mark.parametrize("k", [1, 2, 5, 16])
@pytest.mark.parametrize("levels", [1, 2, 40])
def test_of_equal_scores_the_first_win(size: int, k: int, levels: int) -> None:
    scores = np.random.default_rng(size).integers(0, levels, (4, size)).astype(np.float32)
    _check(scores, k)


def test_winners_in_one_block_and_in_the_padded_last_block() -> None:
    size = 4099
    assert size % block_size(size, 4)
    scores = np.zeros((2, size), dtype=np.float32)
    scores[0, 512:516] = [4, 3, 2, 1]  # one block has all of them
    scores[1, -3:] = [1, 3, 2]  # beyond the last full block
    _check(scores, 4)


def test_of_equal_scores_the_first_wins_though_its_block_is_not_the_best() -> None:
    size, block = 4096, block_size(4096, 2)
    scores = np.zeros((1, size), dtype=np.float32)
    scores[0, 5] = 1
    scores[0, 3 * block + 1 : 3 * block + 4] = [1, 9, 1]
    assert np.array(top_k(mx.array(scores), 2)[1]).tolist() == [[3 * block + 2, 5]]
    _check(scores, 2)


def test_minus_infinity_is_never_preferred() -> None:
    size = 5000
    scores = np.full((1, size), -np.inf, dtype=np.float32)
    scores[0, [7, 4000, 4999]] = [-1e30, -5, -5]
    _, indices = top_k(mx.array(scores), 3)
    assert np.array(indices).tolist() == [[4000, 4999, 7]]


def test_k_of_the_whole_row_sorts_it() -> None:
    _check(np.array([[2.0, 9.0, 2.0]], dtype=np.float32), 3)


@given(
    scores=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 3000)),
        elements=st.floats(-8, 8, width=16),
        fill=st.sampled_from([0.0, -1.0]),
    ),
    k=st.integers(1, 4),
)
def test_any_scores(scores: np.ndarray, k: int) -> None:
    _check(scores, min(k, scores.shape[1]))
