"""A prompt cache holds, however generation ends, what stock mlx-lm leaves in it."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    KVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from mlx_redrafter import DraftModel, stream_generate
from mlx_redrafter.engine.responses import ResponseStream
from mlx_redrafter.errors import ConfigError
from tests.helpers.drafts import RandomShapes, Scripted, use_policy
from tests.helpers.equality import assert_same_tokens, ids, stock_tokens, stream, tokens
from tests.helpers.models import random_drafter, wrapped_tokenizer
from tests.unit.target.test_tree_cache import assert_same_rows, prefilled

VOCAB_SIZE = 64
PROMPT = [5, 17, 3, 60]
DRAFTS = ["none", "random", "mostly right", "mostly right beams", "mostly right of any shape"]


@pytest.fixture(scope="module")
def text(model: nn.Module) -> list[int]:
    """What the model writes after the prompt."""
    return ids(stock_tokens(model, PROMPT, 40))


Start = Callable[..., ResponseStream]


@pytest.fixture(params=DRAFTS)
def start(
    request: Any, model: nn.Module, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> Start:
    """Starts generation after `PROMPT` with drafts of some quality."""
    drafter: Any = None if request.param == "none" else random_drafter(VOCAB_SIZE, 32)
    shape: dict[str, Any] = {"beam_width": 4, "beam_length": 5, "tree_nodes": 9}
    if request.param.endswith("beams"):
        shape = {"select": "beam"}
    elif request.param.endswith("any shape"):  # plain steps between them, too
        use_policy(monkeypatch, RandomShapes(4))
    if request.param.startswith("mostly right"):
        drafter = Scripted(text, VOCAB_SIZE, accuracy=0.9)

    def generate(**options: Any) -> ResponseStream:
        return stream(model, PROMPT, drafter, **{**shape, **options})

    return generate


def _assert_holds(model: nn.Module, cache: list[Any], tokens: list[int]) -> None:
    assert [layer.offset for layer in cache] == [len(tokens)] * len(cache)
    assert_same_rows(cache, prefilled(model, tokens))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 10, 18])
def test_at_max_tokens_and_at_a_stop_token(model, text, start, count):
    stop = text[count - 1]
    ends = [(count, {"max_tokens": count}), (text.index(stop) + 1, {"stop_tokens": {stop}})]
    for length, end in ends:
        cache, stock = make_prompt_cache(model), make_prompt_cache(model)
        assert [r.token for r in start(prompt_cache=cache, **end)] == text[:length]
        _assert_holds(model, cache, PROMPT + text[:length])
        stock_tokens(model, PROMPT, length, prompt_cache=stock)
        assert [layer.offset for layer in cache] == [layer.offset for layer in stock]


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_after_an_error_in_the_progress_callback(model, start, call):
    """Prompts of 4 tokens in chunks of 2 report 0, 2, 3 and, with the first token, 4."""
    cache = make_prompt_cache(model)
    fail = Mock(side_effect=[*[None] * (call - 1), KeyboardInterrupt])
    responses = start(
        max_tokens=9, prompt_cache=cache, prefill_step_size=2, prompt_progress_callback=fail
    )
    with pytest.raises(KeyboardInterrupt):
        next(responses)
    calls = [done for (done, _), _ in fail.call_args_list]
    assert calls == [0, 2, 3, 4][:call]
    if calls[-1]:
        _assert_holds(model, cache, PROMPT[: calls[-1]])
    else:
        assert [layer.offset for layer in cache] == [0] * len(cache)


def test_stock_mlx_lm_continues_exactly(model, text, start, tmp_path):
    cache = make_prompt_cache(model)
    found = [r.token for r in start(max_tokens=13, prompt_cache=cache)]
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    question = [9, 33]
    whole = [*PROMPT, *found, *question]
    expected = stock_tokens(model, whole, 20)
    for kept in (cache, loaded):
        trimmed = copy.deepcopy(kept)
        continued = stock_tokens(model, question, 20, prompt_cache=kept)
        assert_same_tokens(expected, ids(continued))
        trim_prompt_cache(trimmed, 5)
        continued = stock_tokens(model, [9], 20, prompt_cache=trimmed)
        shorter = stock_tokens(model, [*PROMPT, *found[:8], 9], 20)
        assert_same_tokens(shorter, ids(continued))


def test_keyed_sampling_continues_from_a_cache_as_from_the_whole_prompt(model):
    """Noise belongs to positions in the text, cached ones included."""
    options: dict[str, Any] = {"temp": 1.0, "seed": 3, "max_tokens": 12}
    whole, cache = tokens(model, PROMPT, **options), prefilled(model, PROMPT[:2])
    drafter = random_drafter(VOCAB_SIZE, 32)
    assert tokens(model, PROMPT[2:], drafter, prompt_cache=cache, **options) == whole


def _read_two(model: nn.Module, cache: list[Any]) -> None:
    cache[:] = make_prompt_cache(model)
    model(mx.array([[1, 2], [3, 4]]), cache=cache)


def _fill_other_heads(model: nn.Module, cache: list[Any]) -> None:
    cache[:] = make_prompt_cache(model)
    for layer in cache:
        layer.update_and_fetch(mx.zeros((1, 2, 3, 16)), mx.zeros((1, 2, 3, 8)))


def _set_all(name: str, value: Any) -> Callable[[nn.Module, list[Any]], object]:
    return lambda _, cache: [setattr(layer, name, value) for layer in cache]


BAD = [
    (_read_two, "a batch of 2 texts; give the cache of one"),
    (lambda _, cache: cache[1].trim(1), "layers of 2 to 3 tokens, but they must hold the same"),
    (lambda _, cache: cache.__setitem__(0, KVCache()), "layers of 0 to 3 tokens, but they must"),
    (lambda _, cache: cache.__setitem__(slice(0, None), [KVCache()] * 3), "one cache object in"),
    (_fill_other_heads, "keys of 2 heads of size 16 in layer 0, the model's are 2 of size 8"),
    (
        lambda _, cache: setattr(cache[2], "state", (None, None, 3)),
        "layer 2 holds 3 tokens, but has 0 entries of keys",
    ),
    (_set_all("offset", 10**9), "layer 0 holds 1000000000 tokens, but has 256 entries of keys"),
    (_set_all("state", ("keys", "values", 1)), "keys of 0 heads of size 0 in layer 0"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
@pytest.mark.parametrize("whose", ["target", "draft model"])
def test_caches_that_are_not_those_of_one_text_are_refused(model, change, message, whose):
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    cache, drafter = prefilled(model, [1, 2, 3]), None
    change(model, cache)
    if whose == "draft model":
        drafter = DraftModel(model, tokenizer)
        cache = [*make_prompt_cache(model), *cache]
    before = [(layer.offset, layer.keys) for layer in cache]
    with pytest.raises(ConfigError, match=message):
        stream_generate(model, tokenizer, PROMPT, drafter=drafter, prompt_cache=cache)
    assert [(layer.offset, layer.keys) for layer in cache] == before


def test_one_cache_object_of_target_and_draft_model_is_refused(model):
    tokenizer, cache = wrapped_tokenizer(VOCAB_SIZE), make_prompt_cache(model)
    drafter, given = DraftModel(model, tokenizer), [*cache, *cache]
    with pytest.raises(ConfigError, match="one cache object in several layers"):
        stream_generate(model, tokenizer, PROMPT, drafter=drafter, prompt_cache=given)


def test_a_cache_belongs_to_one_text_at_a_time(model, text, start):
    cache = make_prompt_cache(model)
    first = start(max_tokens=9, prompt_cache=cache)
    for read in (0, 1, 8):  # not begun, in the middle, and before its end
        for _ in range(read):
            next(first)
        with pytest.raises(ConfigError, match="in use by a text that has not ended; read that"):
            start(max_tokens=9, prompt_cache=cache)
        with pytest.raises(ConfigError, match="in use"):
            start(max_tokens=9, prompt_cache=[*make_prompt_cache(model)[1:], cache[0]])
    assert list(first) == []
    _assert_holds(model, cache, PROMPT + text[:9])
    start(max_tokens=9, prompt_cache=cache).close()  # before it has begun
    _assert_holds(model, cache, PROMPT + text[:9])
    second = start(max_tokens=9, prompt_cache=cache)
    next(second)
    start(max_tokens=9, prompt_cache=make_prompt_cache(model))
    del second  # and with it its claim
    list(start(max_tokens=1, prompt_cache=cache))
    copied = copy.deepcopy(cache)
    third = start(max_tokens=9, prompt_cache=cache)
    assert [r.token for r in third] == [r.token for r in start(max_tokens=9, prompt_cache=copied)]


def test_of_threads_that_want_one_cache_one_gets_it(model, start):
    cache, barrier = make_prompt_cache(model), threading.Barrier(4)

    def work(_: int) -> Any:
        barrier.wait()
        try:
            return start(max_tokens=9, prompt_cache=cache)
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    assert sum(isinstance(one, ConfigError) for one in results) == 3
