"""Medians and their intervals."""

import pytest

from mlx_redrafter.bench.timing import estimate


def test_estimate():
    found = estimate([3.0, 1.0, 2.0, 5.0, 4.0])
    assert found.median == 3
    assert found.quartiles == (2, 4)
    assert 1 <= found.low <= 3 <= found.high <= 5
    assert found.count == 5
    assert found.span(".0f").endswith("(95%)")


@pytest.mark.parametrize(
    ("samples", "span"),
    [
        ([3.0], ""),
        ([3.0, 1.0], "1 to 3 (range of 2)"),
        ([3.0, 1.0, 2.0, 5.0], "1 to 5 (range of 4)"),
    ],
)
def test_few_samples_have_a_range_and_no_interval(samples, span):
    found = estimate(samples)
    assert (found.low, found.high) == (min(samples), max(samples))
    assert found.span(".0f") == span
