"""Turns, medians and their intervals."""

import pytest

from mlx_redrafter.bench.lab.rounds import take_turns
from mlx_redrafter.bench.timing import estimate


def test_every_round_starts_with_another_job():
    calls, progress = [], []

    def job(name, seconds):
        def run():
            calls.append(name)
            return seconds + len(calls)

        return run

    samples = take_turns(
        {"a": job("a", 100), "b": job("b", 200)},
        rounds=2,
        warm_up=1,
        on_progress=lambda *done: progress.append(done),
    )
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert samples == {"a": [104, 105], "b": [203, 206]}
    assert progress == [(1, 3), (2, 3), (3, 3)]


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
