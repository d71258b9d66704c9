"""Layers with sliding windows or chunks: trees, texts and prompt caches against stock mlx-lm.

Axes: N nodes of a tree, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter import Engine, stream_generate
from mlx_redrafter.engine.profiling import blank_cache
from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.target.architectures import SUPPORTED
from mlx_redrafter.target.caches.cache_kinds import parts_of
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.caches.sliding import SlidingCache
from mlx_redrafter.target.caches.tree_pass import Layout
from mlx_redrafter.target.target import Target
from tests.helpers.drafts import RandomShapes, Scripted, use_policy
from tests.helpers.equality import Scored, assert_same_tokens, ids, stock_tokens
from tests.helpers.memory import peak_of
from tests.helpers.models import random_drafter, wrapped_tokenizer
from tests.models.test_architectures import (
    TOLERANCE,
    VISIBLE,
    assert_tree_agrees,
    disagreement,
)
from tests.models.tiny_models import (
    VOCAB_SIZE,
    WINDOW,
    WITH_WINDOWS,
    Config,
    build,
    tiny_config,
    windowed_config,
)
from tests.models.trees import (
    PROMPT,
    branching_tree,
    decode_paths,
    rows_of,
    verify_after_prompt,
)

NUM_TOKENS = 30
# What continues a text: single tokens, then chunks.
CHUNK = [9, 8, 7, 6, 5, 4, 3]


def prompt_of(length: int) -> list[int]:
    """A prompt of some length."""
    rng = random.Random(length)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def continue_with_stock(model: nn.Module, cache: list[Any]) -> list[Scored]:
    """What stock mlx-lm writes from a cache, token by token, and after a prompt in chunks."""
    single = stock_tokens(model, CHUNK[:1], 4, prompt_cache=cache)
    return single + stock_tokens(model, CHUNK, 4, prompt_cache=cache, prefill_step_size=3)


def assert_continues_alike(
    model: nn.Module, found: list[Any], expected: list[Any], oldest: int = 0
) -> None:
    """Two caches hold the same rows from ``oldest`` on, and mlx-lm goes on from both alike."""
    for layer, other in zip(found, expected, strict=True):
        assert num_tokens([layer]) == num_tokens([other])
        for rows, truth in zip(rows_of(layer), rows_of(other), strict=True):
            assert disagreement(rows[..., oldest:, :], truth[..., oldest:, :]) <= TOLERANCE
    expected_text = continue_with_stock(model, expected)
    text = continue_with_stock(model, found)
    assert_same_tokens(expected_text, ids(text), "continued")
    for (_, log_probs), (_, truth) in zip(text, expected_text, strict=True):
        assert disagreement(log_probs, truth) <= TOLERANCE


def test_the_families_with_windows_are_known() -> None:
    found = {
        name
        for name in SUPPORTED
        if any(
            isinstance(layer, RotatingKVCache | ChunkedKVCache)
            for layer in parts_of(make_prompt_cache(build(tiny_config(name, SUPPORTED[name][0]))))
        )
    }
    elsewhere = {"baichuan_m1", "gear", "recurrent_gemma"}  # with states, in the tests of those
    assert found - elsewhere == {name for name, extra in WITH_WINDOWS.items() if not extra}


# The prompt ends before the window is full, when it is, after it, and has wrapped several times;
# some windows are smaller than the tree is deep. Of each kind of mask one model has all windows.
@pytest.mark.parametrize(
    ("model_type", "window"),
    [
        (name, window)
        for number, name in enumerate(WITH_WINDOWS)
        for place, window in enumerate([1, 3, 6, 11, 12, 13, 15, 30])
        if name in ("gemma3_text", "gpt_oss", "llama4", "smollm3") or (number - place) % 4 == 0
    ],
)
def test_tree_logits_around_the_window(model_type: str, window: int) -> None:
    assert_tree_agrees(build(windowed_config(model_type, window)))


@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("model_type", WITH_WINDOWS)
def test_a_mask_off_by_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch, model_type: str, wrong: int
) -> None:
    model = build(windowed_config(model_type, 6))
    tree = branching_tree()
    expected = decode_paths(model, tree).logits
    for name in ("window_mask", "chunk_mask"):
        mask = getattr(Layout, name)
        monkeypatch.setattr(
            Layout, name, lambda layout, size, mask=mask: mask(layout, size + wrong)
        )
    found = verify_after_prompt(Target(model), tree).logits
    assert disagreement(found, expected) > VISIBLE


def assert_texts_of_any_shapes(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, length: int
) -> None:
    """Trees of all sizes with plain steps between, and the cache after them."""
    prompt = prompt_of(length)
    stock_cache, cache = make_prompt_cache(model), make_prompt_cache(model)
    stock = stock_tokens(model, prompt, NUM_TOKENS, prompt_cache=stock_cache)
    use_policy(monkeypatch, RandomShapes(length))
    drafter: Any = Scripted(ids(stock), VOCAB_SIZE, accuracy=0.8)
    found = list(
        stream_generate(
            model,
            wrapped_tokenizer(VOCAB_SIZE),
            prompt,
            drafter=drafter,
            max_tokens=NUM_TOKENS,
            prompt_cache=cache,
        )
    )
    assert_same_tokens(stock, [response.token for response in found])
    for response, (_, log_probs) in zip(found, stock, strict=True):
        assert disagreement(response.logprobs, log_probs) <= TOLERANCE
    assert_continues_alike(model, cache, stock_cache)


@pytest.mark.parametrize(
    ("model_type", "length"),
    list(zip(WITH_WINDOWS, itertools.cycle([WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW]))),
)
@pytest.mark.usefixtures("few_shapes_or_not")
def test_texts_of_any_shapes(monkeypatch: pytest.MonkeyPatch, model_type: str, length: int) -> None:
    """Over several wraps."""
    monkeypatch.setattr(ChunkedKVCache, "step", 32)  # so that buffers are copied, too
    assert_texts_of_any_shapes(monkeypatch, build(windowed_config(model_type)), length)


SAMPLERS: list[dict[str, Any]] = [{"temp": 0.7}, {"temp": 1.0, "top_p": 0.9}]


def assert_sampled_texts(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, options: dict[str, Any]
) -> None:
    """With seeds and with a sampler of mlx-lm, drafts or not."""
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)

    def write(drafter: Any, **options: Any) -> list[int]:
        responses = stream_generate(
            model, tokenizer, PROMPT, drafter=drafter, max_tokens=40, **options
        )
        return [response.token for response in responses]

    plain = write(None, seed=5, **options)
    mx.random.seed(5)
    stock = stock_tokens(model, PROMPT, 40, sampler=make_sampler(**options))
    use_policy(monkeypatch, RandomShapes(3))
    assert write(Scripted(plain, VOCAB_SIZE, accuracy=0.8), seed=5, **options) == plain
    mx.random.seed(5)
    drafted = write(Scripted(ids(stock), VOCAB_SIZE, 0.8), sampler=make_sampler(**options))
    assert_same_tokens(stock, drafted)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "llama"])
@pytest.mark.parametrize("options", SAMPLERS, ids=str)
def test_sampled_texts(
    monkeypatch: pytest.MonkeyPatch, model_type: str, options: dict[str, Any]
) -> None:
    assert_sampled_texts(monkeypatch, build(windowed_config(model_type)), options)


def assert_conversation(model: nn.Module, has_drafts: bool) -> None:
    """Several turns on one prompt cache."""
    tokenizer = wrapped_tokenizer(VOCAB_SIZE)
    ours, stock = make_prompt_cache(model), make_prompt_cache(model)
    for turn, question in enumerate([[5, 17, 3], [8], [40, 2], prompt_of(20), [7], [1, 2]]):
        expected = stock_tokens(model, question, 5 + turn, prompt_cache=stock)
        drafter: Any = Scripted(ids(expected), VOCAB_SIZE) if has_drafts else None
        found = stream_generate(
            model,
            tokenizer,
            question,
            drafter=drafter,
            max_tokens=5 + turn,
            prompt_cache=ours,
            beam_width=4,
            beam_length=5,
            tree_nodes=9,
        )
        assert_same_tokens(expected, [response.token for response in found], turn)
    assert_continues_alike(model, ours, stock)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma3n", "iquestloopcoder", "llama4"])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_conversations_of_several_turns(model_type: str, has_drafts: bool) -> None:
    assert_conversation(build(windowed_config(model_type)), has_drafts)


def read_by_stock(model: nn.Module, tokens: Sequence[int]) -> list[Any]:
    """A stock cache that read a text token by token."""
    cache = make_prompt_cache(model)
    for token in tokens:
        model(mx.array([[token]]), cache=cache)
    return cache


def windows_only() -> Config:
    """The config of a model of two layers with windows."""
    return {**windowed_config("muse_glimmer"), "layer_types": ["sliding_attention"] * 2}


@functools.cache
def written(model_type: str) -> list[int]:
    """What stock mlx-lm writes after `PROMPT`, greedily."""
    config = windows_only() if model_type == "muse_glimmer" else windowed_config(model_type)
    return ids(stock_tokens(build(config), PROMPT, 40))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 11, 23])
@pytest.mark.parametrize("model_type", ["gemma3_text", "llama4"])
def test_a_text_that_is_closed_in_the_middle(model_type: str, count: int) -> None:
    model, text = build(windowed_config(model_type)), written(model_type)
    cache = make_prompt_cache(model)
    drafter: Any = Scripted(text, VOCAB_SIZE, accuracy=0.95)
    responses = stream_generate(
        model,
        wrapped_tokenizer(VOCAB_SIZE),
        PROMPT,
        drafter=drafter,
        prompt_cache=cache,
        beam_width=4,
        beam_length=6,
        tree_nodes=16,
    )
    assert [next(responses).token for _ in range(count)] == text[:count]
    responses.close()
    assert_continues_alike(model, cache, read_by_stock(model, [*PROMPT, *text[:count]]))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize(
    ("kind", "number"),
    [(RotatingKVCache, 1), (RotatingKVCache, 2), *((SlidingCache, n) for n in (1, 2, 3, 4))],
)
def test_an_interruption_between_two_layers(
    monkeypatch: pytest.MonkeyPatch, kind: type, number: int, has_drafts: bool, layer: int
) -> None:
    """In the prompt, in plain steps, and inside trees: the cache holds tokens that were taken."""
    model, text = build(windows_only()), written("muse_glimmer")
    responses = stream_generate(
        model,
        wrapped_tokenizer(VOCAB_SIZE),
        PROMPT,
        drafter=Scripted(text, VOCAB_SIZE, accuracy=0.95) if has_drafts else None,
        prompt_cache=(cache := make_prompt_cache(model)),
        max_tokens=30,
        prefill_step_size=4,
    )
    interrupt(monkeypatch, kind, 2 * number + layer)
    taken: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        taken.extend(response.token for response in responses)
    monkeypatch.undo()
    held = cache[0].offset
    if kind is RotatingKVCache:  # a chunk of the prompt
        assert held == 4 * number
    else:
        assert len(PROMPT) + len(taken) - 1 <= held <= len(PROMPT) + len(taken)
    expected = read_by_stock(model, [*PROMPT, *text][:held])
    # What was the oldest row when the pass began is gone, and no token sees it any more.
    assert_continues_alike(model, cache, expected, oldest=1)


def interrupt(patch: pytest.MonkeyPatch, kind: type, number: int) -> None:
    """Interrupt the forward pass in which caches of a kind get rows after ``number`` times."""
    calls, fetch = itertools.count(), kind.update_and_fetch  # type: ignore[attr-defined]

    def update(self: Any, keys: mx.array, values: mx.array) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return fetch(self, keys, values)

    patch.setattr(kind, "update_and_fetch", update)


def test_memory_does_not_grow_with_the_text() -> None:
    config = {**windowed_config("muse_glimmer", 100), "layer_types": ["sliding_attention"] * 2}
    target = Target(build(config))

    def peak(length: int) -> int:
        cache, tree = blank_cache(target, length), branching_tree()
        for _ in range(2):  # the first tree makes the buffers
            mx.eval(target.verify(tree, cache).logits)
            cache.commit([0, 1])
        return peak_of(lambda: mx.eval(target.verify(tree, cache).logits))

    # A bool for each position would be a million bytes; other threads' arrays are some thousands.
    assert peak(10**6) < peak(1000) + 10**5


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "llama4"])
def test_prompts_share_their_passes(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    model, shapes, compute = build(windowed_config(model_type, 20)), [], Target.compute

    def counted(target: Target, chunks: mx.array, *others: Any) -> Any:
        shapes.append(chunks.shape)
        return compute(target, chunks, *others)

    monkeypatch.setattr(Target, "compute", counted)
    prompts = [[(3 * n + k) % VOCAB_SIZE for k in range(n)] for n in (17, 40, 18, 41)]
    tokens: list[list[int]] = [[] for _ in prompts]
    engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), None)
    for response in engine.stream_batch(prompts, max_tokens=40):
        tokens[response.number].append(response.response.token)
    assert shapes[:3] == [(4, 16), (2, 23), (4, 2)]
    for number, prompt in enumerate(prompts):
        assert_same_tokens(stock_tokens(model, prompt, 40), tokens[number])


@pytest.mark.parametrize("model_type", ["gemma3_text", "llama4"])
def test_a_long_text_past_many_wraps(model_type: str) -> None:
    model = build(windowed_config(model_type, 20))
    stock = stock_tokens(model, PROMPT, 300)
    drafter: Any = Scripted(ids(stock), VOCAB_SIZE)
    found = stream_generate(
        model, wrapped_tokenizer(VOCAB_SIZE), PROMPT, drafter=drafter, max_tokens=300
    )
    assert_same_tokens(stock, [response.token for response in found])


def test_a_recurrent_drafter_and_lookup() -> None:
    model = build(windowed_config("gpt_oss"))
    stock = stock_tokens(model, PROMPT, 50)
    for drafter in (random_drafter(VOCAB_SIZE, 64), "lookup"):
        found = stream_generate(
            model, wrapped_tokenizer(VOCAB_SIZE), PROMPT, drafter=drafter, max_tokens=50
        )
        assert_same_tokens(stock, [response.token for response in found])


@pytest.mark.parametrize("length", [3, WINDOW, 600])
@pytest.mark.parametrize("model_type", ["gemma3_text", "llama4"])
def test_blank_caches_of_any_length(model_type: str, length: int) -> None:
    target = Target(build(windowed_config(model_type)))
    cache = blank_cache(target, length)
    for shorter in (length, length - 1):
        cache.trim_to(shorter)
        assert {layer.offset for layer in cache.stock} == {shorter}
        for layer in cache.stock:
            most = shorter if type(layer) is KVCache else WINDOW
            assert rows_of(layer)[0].shape[2] == min(shorter, most)
        outputs = target.verify(branching_tree(), cache)
        assert mx.all(mx.isfinite(outputs.logits)).item()


def test_caches_of_other_kinds_are_refused() -> None:
    target = Target(build(windowed_config("gemma3_text")))
    for wrong in (RotatingKVCache(WINDOW, keep=4), RotatingKVCache(WINDOW + 1)):
        _, full = make_prompt_cache(target.model)
        with pytest.raises(
            UnsupportedTargetError,
            match=rf"found RotatingKVCache\(max_size={wrong.max_size}, keep={wrong.keep}\)",
        ):
            target.caches.new([wrong, full])
