"""Drafters in 8 bits: only if they are clearly faster, and the text stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.measured import cache_folder
from mlx_redrafter.proposers.quantization import quantization_of, quantize_drafter
from mlx_redrafter.proposers.redrafter import precision
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.redrafter.precision import (
    GAIN,
    MIN_PAIRS,
    PAIRS,
    Pair,
    choose_precision,
    quantised_copy,
    time_pairs,
)
from mlx_redrafter.target.target import Target
from tests.helpers.models import random_drafter, tiny_llama

VOCAB_SIZE, HIDDEN_SIZE = 64, 32
FASTER, SLOWER = [2.0] * PAIRS, [0.7] * PAIRS
# Most pairs seem faster, some do not.
MIXED = [0.7, 0.7, 0.8, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(precision, "MIN_BYTES", 0)


@pytest.fixture
def drafter() -> Drafter:
    return random_drafter(VOCAB_SIZE, HIDDEN_SIZE)


@pytest.fixture
def target() -> Target:
    return Target(tiny_llama(vocab_size=VOCAB_SIZE))


def _timer(*moments: list[float]) -> Callable[..., list[Pair]]:
    """A timer that finds these ratios, one list per run, and fails in further runs."""
    left: Iterator[list[float]] = iter(moments)
    return lambda *_: [{"given": ratio, "quantised": 1.0} for ratio in next(left)]


def _choose(drafter: Drafter, target: Target, timer: Callable[..., list[Pair]]) -> Drafter:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "time_pairs", timer)
        return choose_precision(drafter, target)


def test_a_copy_in_8_bits_says_nearly_the_same_and_leaves_the_drafter_alone(
    drafter: Drafter,
) -> None:
    hidden, state = mx.random.normal((2, HIDDEN_SIZE), key=mx.random.key(1))
    before = drafter.log_probs(hidden, state[None])
    copy = quantised_copy(drafter)
    assert _bits_of(copy) == 8
    assert _bits_of(drafter) is None
    after = copy.log_probs(hidden, state[None])
    assert mx.abs(after - before).max().item() < 0.2
    assert not mx.array_equal(after, before)
    assert mx.array_equal(drafter.log_probs(hidden, state[None]), before)


@pytest.mark.parametrize(
    ("moments", "bits"),
    [
        ((FASTER, FASTER), (8, 8)),
        ((SLOWER,), (None, None)),
        (([1.0 + 0.9 * (GAIN - 1)] * PAIRS,), (None, None)),
        ((MIXED, FASTER), (None, 8)),
        ((MIXED, SLOWER), (None, None)),
        ((MIXED, MIXED), (None, None)),
        # A loaded moment in which 8 bits seem faster counts for that run alone.
        ((FASTER, SLOWER), (8, None)),
    ],
)
def test_8_bits_are_used_if_they_are_faster_in_both_of_two_runs(
    drafter: Drafter,
    target: Target,
    moments: tuple[list[float], ...],
    bits: tuple[int | None, int | None],
) -> None:
    timer = _timer(*moments)
    for expected in (*bits, bits[-1]):
        found = _choose(drafter, target, timer)
        assert _bits_of(found) == expected
        assert (found is drafter) == (expected is None)


def test_a_damaged_file_is_measured_again(drafter: Drafter, target: Target) -> None:
    assert _choose(drafter, target, _timer(SLOWER)) is drafter
    folder = cache_folder()
    assert folder is not None
    (path,) = folder.glob("*.json")
    one = '{"rounds": [{"given": 1, "quantised": -1}], "runs": 2, "doubted": false}'
    for text in ("", "[]", '{"rounds": []}', one, one.replace("-1", "1").replace("2", "9")):
        path.write_text(text)
        assert _bits_of(_choose(drafter, target, _timer(FASTER))) == 8


def test_both_are_timed(drafter: Drafter, target: Target) -> None:
    pairs = time_pairs(drafter, quantised_copy(drafter), target)
    assert MIN_PAIRS <= len(pairs) <= PAIRS
    assert all(min(pair["given"], pair["quantised"]) > 0 for pair in pairs)


def test_a_drafter_that_is_narrow_or_small_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, drafter: Drafter, target: Target
) -> None:
    narrow = random_drafter(VOCAB_SIZE, 24)
    assert _choose(narrow, target, _timer()) is narrow
    monkeypatch.setattr(precision, "MIN_BYTES", 2**23)
    assert _choose(drafter, target, _timer()) is drafter


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="only CPUs unpack")
def test_a_quantised_drafter_is_unpacked_on_a_cpu(drafter: Drafter, target: Target) -> None:
    quantize_drafter(drafter, 4, 32)
    hidden, state = mx.random.normal((2, HIDDEN_SIZE), key=mx.random.key(1))
    before = drafter.log_probs(hidden, state[None])
    found = _choose(drafter, target, _timer())
    assert _bits_of(found) is None
    assert found.dtype == mx.float32
    assert mx.allclose(found.log_probs(hidden, state[None]), before, atol=1e-4)


def _bits_of(drafter: Drafter) -> int | None:
    found = quantization_of(drafter)
    return None if found is None else found["bits"]
