"""Stock samplers and logits processors give the tokens of stock ``generate_step``."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from tests.helpers.drafts import RandomShapes, Scripted, use_policy
from tests.helpers.equality import assert_same_tokens, ids, stock_tokens, tokens
from tests.helpers.models import random_drafter, tiny_llama

VOCAB_SIZE = 100
PROMPT = [5, 17, 3, 60, 5, 17]
NUM_TOKENS = 18

SAMPLERS: list[dict[str, Any]] = [
    {"temp": 0.7},
    {"temp": 1.0, "top_p": 0.9},
    {"temp": 1.2, "top_k": 9, "min_p": 0.02},
    {"temp": 0.9, "top_p": 0.95, "min_p": 0.05, "top_k": 30},
    {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1},
]
PROCESSORS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.7},
    {"logit_bias": {7: 4.0, 9: -3.0}},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {3: 2.0}},
]
SHAPES: list[dict[str, Any]] = [
    {"beam_width": 1, "beam_length": 5},
    {"beam_width": 4, "beam_length": 4, "tree_nodes": 12},
    {"beam_width": 3, "beam_length": 5, "select": "beam"},
]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama(seed=5, vocab_size=VOCAB_SIZE, layers=2, spread=3.0)


def _random_state() -> list[int]:
    key: Any = mx.random.state
    return list(key[0].tolist())


def _check(
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    shape: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Plain and drafted decoding, with random and mostly right drafts, against stock mlx-lm."""
    drafter = random_drafter(VOCAB_SIZE, 32, seed=seed)
    mx.random.seed(seed)
    expected = stock_tokens(model, PROMPT, NUM_TOKENS, **options)
    state = _random_state()
    right: Any = Scripted(ids(expected), VOCAB_SIZE)
    cases = [(None, None), (drafter, None), (right, None), (right, RandomShapes(seed))]
    for proposer, policy in cases:
        with monkeypatch.context() as patch:
            if policy is not None:
                use_policy(patch, policy)
            mx.random.seed(seed)
            found = tokens(model, PROMPT, proposer, max_tokens=NUM_TOKENS, **options, **shape)
            assert_same_tokens(expected, found, (seed, shape, proposer is None))
            if "sampler" in options:  # the next request starts from the same state, too
                assert _random_state() == state


@pytest.mark.parametrize(("seed", "shape"), list(enumerate(SHAPES)))
@pytest.mark.parametrize("options", SAMPLERS, ids=str)
def test_stock_sampler(
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    shape: dict[str, Any],
    options: dict[str, Any],
) -> None:
    _check(model, monkeypatch, seed, shape, {"sampler": make_sampler(**options)})


@pytest.mark.parametrize(("shape", "options"), list(zip(itertools.cycle(SHAPES), PROCESSORS)))
def test_processors_at_temperature_zero(
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, Any],
    options: dict[str, Any],
) -> None:
    processors = make_logits_processors(**options)
    without = ids(stock_tokens(model, PROMPT, NUM_TOKENS))
    assert ids(stock_tokens(model, PROMPT, NUM_TOKENS, logits_processors=processors)) != without
    _check(model, monkeypatch, 1, shape, {"logits_processors": processors})


@pytest.mark.parametrize("options", PROCESSORS, ids=str)
def test_processors_with_a_stock_sampler(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    stock = {
        "logits_processors": make_logits_processors(**options),
        "sampler": make_sampler(temp=0.9, top_p=0.95),
    }
    _check(model, monkeypatch, 3, SHAPES[1], stock)


def test_processors_see_the_prompt_and_every_token_before(model: nn.Module) -> None:
    expected = ids(stock_tokens(model, PROMPT, 12))
    seen: list[list[int]] = []

    def record(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    options: dict[str, Any] = {"max_tokens": 12, "logits_processors": [record]}
    tokens(model, PROMPT, **options)
    assert seen == [PROMPT + expected[:n] for n in range(12)]
    seen.clear()
    tokens(model, PROMPT, Scripted(expected, VOCAB_SIZE), **options)
    histories = {tuple(history) for history in seen}
    assert {tuple(PROMPT + expected[:n]) for n in range(12)} <= histories
