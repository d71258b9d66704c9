"""Texts of stock mlx-lm and of this package, and exact comparisons of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter import stream_generate
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.engine.responses import ResponseStream
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.model_parts import find_parts
from tests.helpers.models import wrapped_tokenizer

Scored = tuple[int, mx.array]


def stock_tokens(
    model: nn.Module, prompt: Sequence[int], max_tokens: int, **options: Any
) -> list[Scored]:
    """Tokens of stock ``mlx_lm.generate_step`` with their log-probabilities."""
    # Despite its annotation it yields numbers.
    steps: Any = generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens, **options)
    return list(steps)


def ids(scored: Iterable[Scored]) -> list[int]:
    return [token for token, _ in scored]


def assert_same_tokens(expected: Sequence[Scored], found: Sequence[int], what: object = "") -> None:
    """Fail at the first token that differs, and say how close the two best were there."""
    for position, ((token, log_probs), other) in enumerate(zip(expected, found, strict=False)):
        if token != other:
            row = np.array(log_probs.astype(mx.float32))
            first, second = (int(i) for i in np.argsort(-row)[:2])
            pytest.fail(
                f"{what}: token {position} is {other}, expected {token}; the best are "
                f"{first} ({row[first]:.7f}) and {second} ({row[second]:.7f})"
            )
    assert len(found) == len(expected), f"{what}: {len(found)} tokens, expected {len(expected)}"


def stream(
    model: nn.Module, prompt: Any, drafter: Any = None, *, tokenizer: Any = None, **options: Any
) -> ResponseStream:
    """Begin a text of this package, by default with characters as tokens, and an end at none."""
    stop = options.pop("stop_tokens", None)
    if tokenizer is None:
        tokenizer = wrapped_tokenizer(find_parts(model).vocab_size, stop)
    return stream_generate(model, tokenizer, prompt, drafter=drafter, **options)


def tokens(model: nn.Module, prompt: Any, drafter: Any = None, **options: Any) -> list[int]:
    """Tokens of a text of this package; arguments as of `stream`."""
    return [response.token for response in stream(model, prompt, drafter, **options)]


def plain_tokens(model: nn.Module, prompt: Any, **options: Any) -> list[Scored]:
    """Tokens of a text without drafts, with their log-probabilities."""
    return [(one.token, one.logprobs) for one in stream(model, prompt, None, **options)]


def assert_turns(
    model: nn.Module,
    drafter: Any,
    turns: Iterable[list[int]],
    own: Sequence[Any] = (),
    behind: int = 0,
    max_tokens: int = 9,
    **shape: Any,
) -> None:
    """Check texts that go on in one prompt cache, and what the cache holds after each.

    The drafter's ``own`` layers stand after those of the target, and leave out ``behind`` tokens of
    each turn.
    """
    stock, cache = make_prompt_cache(model), make_prompt_cache(model)
    for number, turn in enumerate(turns, start=1):
        expected = stock_tokens(model, turn, max_tokens, prompt_cache=stock)
        given = [*cache, *own]
        found = tokens(model, turn, drafter, max_tokens=max_tokens, prompt_cache=given, **shape)
        assert_same_tokens(expected, found, turn)
        held = [num_tokens([layer]) for layer in cache]
        assert held == [num_tokens([layer]) for layer in stock]
        assert {layer.offset for layer in own} <= {(num_tokens(cache) or 0) - behind * number}


def batch_texts(stream: Iterable[Any], count: int) -> list[str]:
    """Texts of the responses of a batch of ``count`` prompts."""
    texts = [""] * count
    for number, response in stream:
        texts[number] += response.text
    return texts


def batch_tokens(stream: Iterable[Any], count: int) -> list[list[int]]:
    """Tokens of the responses of a batch of ``count`` prompts."""
    tokens: list[list[int]] = [[] for _ in range(count)]
    for number, response in stream:
        tokens[number].append(response.token)
    return tokens


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    """Check that two networks have the same parameters by the same names."""
    weights, others = named_parameters(found), named_parameters(expected)
    assert weights.keys() == others.keys()
    assert all(mx.array_equal(weights[name], others[name]).item() for name in weights)
