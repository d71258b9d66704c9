"""Drafters in 8 bits: only where they are faster, and the text stays."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.engine.generation import stream_generate
from mlx_redrafter.proposers.redrafter import precision
from mlx_redrafter.proposers.redrafter.checkpoint import quantize_drafter
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.redrafter.precision import (
    GIVEN,
    QUANTISED,
    bits_of,
    choose_precision,
    quantised_copy,
    time_drafts,
)
from mlx_redrafter.target.target import Target
from tests.helpers.equality import assert_same_tokens, stock_tokens
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

VOCAB_SIZE, HIDDEN_SIZE = 64, 32


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def drafter() -> Drafter:
    return random_drafter(VOCAB_SIZE, HIDDEN_SIZE)


@pytest.fixture
def target() -> Target:
    return Target(tiny_llama(vocab_size=VOCAB_SIZE))


def _pretend(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    times = {GIVEN: 1.0, QUANTISED: seconds}
    monkeypatch.setattr(precision, "time_drafts", lambda drafters, embed: times)


def test_a_copy_in_8_bits_says_nearly_the_same_and_leaves_the_drafter_alone(
    drafter: Drafter,
) -> None:
    hidden, state = mx.random.normal((2, HIDDEN_SIZE), key=mx.random.key(1))
    before = drafter.log_probs(hidden, state[None])
    copy = quantised_copy(drafter)
    assert bits_of(copy) == 8
    assert bits_of(drafter) is None
    after = copy.log_probs(hidden, state[None])
    assert mx.abs(after - before).max().item() < 0.2
    assert not mx.array_equal(after, before)
    assert mx.array_equal(drafter.log_probs(hidden, state[None]), before)


@pytest.mark.parametrize(("seconds", "bits"), [(0.5, 8), (0.95, None), (2.0, None)])
def test_8_bits_are_used_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch,
    drafter: Drafter,
    target: Target,
    seconds: float,
    bits: int | None,
) -> None:
    _pretend(monkeypatch, seconds)
    found = choose_precision(drafter, target)
    assert bits_of(found) == bits
    assert (found is drafter) == (bits is None)
    monkeypatch.setattr(precision, "time_drafts", lambda *_: pytest.fail("timed again"))
    assert bits_of(choose_precision(drafter, target)) == bits


def test_both_are_timed(drafter: Drafter, target: Target) -> None:
    both = {GIVEN: drafter, QUANTISED: quantised_copy(drafter)}
    seconds = time_drafts(both, target)
    assert seconds.keys() == both.keys()
    assert all(value > 0 for value in seconds.values())


def test_what_cannot_or_need_not_be_quantised_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, drafter: Drafter, target: Target
) -> None:
    monkeypatch.setattr(precision, "time_drafts", lambda *_: pytest.fail("timed"))
    quantize_drafter(drafter, 4, 32)
    assert choose_precision(drafter, target) is drafter
    narrow = random_drafter(VOCAB_SIZE, 24)
    assert choose_precision(narrow, target) is narrow


def test_the_text_is_the_same(
    monkeypatch: pytest.MonkeyPatch, drafter: Drafter, target: Target
) -> None:
    _pretend(monkeypatch, 0.5)
    found = choose_precision(drafter, target)
    assert bits_of(found) == 8
    prompt, tokenizer = [1, 2, 3], wrapped_tokenizer(VOCAB_SIZE)
    stock = stock_tokens(target.model, prompt, 60)
    for width in (1, 4):
        responses = stream_generate(
            target.model, tokenizer, prompt, max_tokens=60, drafter=found, beam_width=width
        )
        assert_same_tokens(stock, [response.token for response in responses], width)
