"""Attention in two parts, and the rows of a model that drafts.

Axes: W beams, S committed rows, F rows aside.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.target.caches.draft_cache import DraftMask, attend_in_two_parts


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("width", [1, 3])
def test_two_parts_are_attention_over_all_rows(heads: int, width: int) -> None:
    groups, size, num_committed, num_aside = 2, 16, 37, 6
    keys = mx.random.split(mx.random.key(heads * width), 6)
    queries = mx.random.normal((1, heads, width, size), key=keys[0])
    committed, aside = (
        (
            mx.random.normal((1, groups, rows, size), key=mx.random.key(i)),
            mx.random.normal((1, groups, rows, size), key=keys[i]),
        )
        for i, rows in ((1, num_committed), (2, num_aside))
    )
    seen = mx.random.uniform(shape=(num_committed,), key=keys[3]) < 0.6
    own = mx.random.uniform(shape=(width, num_aside), key=keys[4]) < 0.6
    own[:, -1] = True
    mask = DraftMask(seen, own)
    found = attend_in_two_parts(queries, committed, aside, mask, 0.3)
    expected = mx.fast.scaled_dot_product_attention(
        queries,
        mx.concatenate([committed[0], aside[0]], axis=2),
        mx.concatenate([committed[1], aside[1]], axis=2),
        scale=0.3,
        mask=mask.joined,
    )
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-6, rtol=0)


def test_rows_that_are_not_seen_count_nothing() -> None:
    ones = mx.ones((1, 1, 4, 8))
    mask = DraftMask(mx.array([True, True, True, False]), mx.array([[True, False]]))
    values = mx.concatenate([ones[..., :3, :], 1e4 * ones[..., :1, :]], axis=2)
    found = attend_in_two_parts(
        mx.ones((1, 1, 1, 8)), (ones, values), (ones[..., :2, :], values[..., 2:, :]), mask, 1.0
    )
    np.testing.assert_allclose(np.array(found), 1.0, rtol=1e-6)
