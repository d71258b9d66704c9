"""Proposers that need no training leave every text as stock mlx-lm has it.

Lookup alone and in front of a network, and draft models: one that is the target, one of other
weights of the same sizes, one that is smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.proposers import draft_model
from mlx_redrafter.proposers.draft_model import DraftModel
from tests.helpers.equality import (
    Scored,
    assert_same_tokens,
    assert_turns,
    ids,
    stock_tokens,
    stream,
    tokens,
)
from tests.helpers.models import random_drafter, tiny_llama, tiny_qwen3

VOCAB_SIZE = 64
# Passages that come back, so that there is something to look up.
PROMPT = [5, 17, 3, 60, 9, 12, 5, 17, 3, 60, 8, 30, 5, 17, 3]
NUM_TOKENS = 20
SHAPES: list[dict[str, Any]] = [
    {},
    {"beam_width": 1, "beam_length": 6},
    {"beam_width": 3, "beam_length": 5, "tree_nodes": 12},
]
SAMPLERS: list[dict[str, Any]] = [
    {"temp": 0.7},
    {"temp": 1.1, "top_p": 0.9},
    {"temp": 1.0, "min_p": 0.05},
]
PROCESSORS: list[dict[str, Any]] = [{"repetition_penalty": 1.3}, {"logit_bias": {7: 4.0, 9: -3.0}}]

MODEL = tiny_llama(seed=4)


@pytest.fixture(autouse=True)
def _same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models have no tokenizers of their own."""
    monkeypatch.setattr(draft_model, "check_ids", lambda *_: None)


def _perturbed() -> nn.Module:
    """The target with noise in its head: mostly right."""
    model: Any = tiny_llama(seed=4)
    head = model["lm_head"]
    head.weight = head.weight + 0.3 * mx.random.normal(head.weight.shape, key=mx.random.key(1))
    mx.eval(head.weight)
    return model


GUESTS: dict[str, Callable[[], Any]] = {
    "lookup": lambda: "lookup",
    "the target itself": lambda: DraftModel(MODEL, None),
    "a similar model": lambda: DraftModel(_perturbed(), None),
    "another model": lambda: DraftModel(tiny_qwen3(seed=8), None),
    "a smaller model": lambda: DraftModel(tiny_llama(seed=9, layers=1), None),
    "lookup in front of a network": lambda: random_drafter(VOCAB_SIZE, 32),
}


@pytest.fixture(scope="module", params=GUESTS)
def guest(request: pytest.FixtureRequest) -> Any:
    return GUESTS[request.param]()


# What every guest is compared with, decoded once.
@cache
def _greedy() -> list[Scored]:
    return stock_tokens(MODEL, PROMPT, NUM_TOKENS)


@cache
def _plain(temp: float) -> list[int]:
    return tokens(MODEL, PROMPT, temp=temp, seed=11, max_tokens=NUM_TOKENS)


@cache
def _sampled_by_stock(number: int) -> list[Scored]:
    mx.random.seed(3)
    return stock_tokens(MODEL, PROMPT, 16, sampler=make_sampler(**SAMPLERS[number]))


@cache
def _processed_by_stock(number: int) -> list[Scored]:
    processors = make_logits_processors(**PROCESSORS[number])
    return stock_tokens(MODEL, PROMPT, 16, logits_processors=processors)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_texts_are_stock_mlx_lms(guest: Any, shape: dict[str, Any]) -> None:
    assert_same_tokens(_greedy(), tokens(MODEL, PROMPT, guest, max_tokens=NUM_TOKENS, **shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("temp", "couple"), [(0.6, True), (1.0, False)])
def test_sampled_texts_are_those_of_plain_decoding(
    guest: Any, shape: dict[str, Any], temp: float, couple: bool
) -> None:
    options: dict[str, Any] = {"temp": temp, "seed": 11, "max_tokens": NUM_TOKENS}
    assert tokens(MODEL, PROMPT, guest, couple=couple, **options, **shape) == _plain(temp)


@pytest.mark.parametrize(("number", "shape"), list(enumerate(SHAPES)))
def test_stock_samplers(guest: Any, number: int, shape: dict[str, Any]) -> None:
    expected = _sampled_by_stock(number)
    mx.random.seed(3)
    found = tokens(
        MODEL, PROMPT, guest, max_tokens=16, sampler=make_sampler(**SAMPLERS[number]), **shape
    )
    assert_same_tokens(expected, found)


@pytest.mark.parametrize(("number", "shape"), [(i % 2, one) for i, one in enumerate(SHAPES)])
def test_stock_logits_processors(guest: Any, number: int, shape: dict[str, Any]) -> None:
    processors = make_logits_processors(**PROCESSORS[number])
    found = tokens(MODEL, PROMPT, guest, max_tokens=16, logits_processors=processors, **shape)
    assert_same_tokens(_processed_by_stock(number), found)


@pytest.mark.parametrize(("number", "shape"), list(enumerate(SHAPES)))
def test_stop_tokens_end_inside_a_draft(guest: Any, number: int, shape: dict[str, Any]) -> None:
    text = ids(_greedy())[:16]  # several drafts of every shape
    for stop in list(dict.fromkeys(text))[number :: len(SHAPES)]:
        found = tokens(MODEL, PROMPT, guest, stop_tokens={stop}, max_tokens=len(text), **shape)
        assert found == text[: text.index(stop) + 1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_turns_on_one_prompt_cache(guest: Any, shape: dict[str, Any]) -> None:
    """With the target's layers alone, and with those of a draft model after them."""
    turns = [PROMPT, [7, 8, 9], [60], PROMPT]
    assert_turns(MODEL, guest, turns, max_tokens=7, **shape)
    if isinstance(guest, DraftModel):
        own = make_prompt_cache(guest.target.model)
        assert_turns(MODEL, guest, turns, own, max_tokens=7, **shape)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=8)
def test_any_repetitive_prompt(seed: int) -> None:
    keys = mx.random.split(mx.random.key(seed))
    passage = to_ints(mx.random.randint(1, VOCAB_SIZE, (9,), key=keys[0]))
    cuts = sorted(to_ints(mx.random.randint(0, 9, (6,), key=keys[1])))
    prompt = [*passage, *(t for a, b in pairwise(cuts) for t in passage[a:b]), *passage[:3]]
    expected = stock_tokens(MODEL, prompt, 24)
    for shape in SHAPES:
        assert_same_tokens(expected, tokens(MODEL, prompt, "lookup", max_tokens=24, **shape))


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("length", [2, 5, 9])
def test_the_target_accepts_all_of_itself(temp: float, length: int) -> None:
    shape = {"beam_width": 1, "beam_length": length, "tree_nodes": length}
    options = {"temp": temp, "seed": 5, "max_tokens": 1 + 6 * length, **shape}
    *_, last = stream(MODEL, PROMPT, DraftModel(MODEL, None), **options)
    assert last.stats.accepted_counts == [0] * (length - 1) + [6]
