"""Texts through windows, chunks, states and quantised rows, and their caches: stock mlx-lm's."""

import functools
import itertools
import random
from dataclasses import astuple
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.stored_costs import blank_cache
from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.target.architectures import SUPPORTED
from mlx_redrafter.target.caches.full import FullCache
from mlx_redrafter.target.caches.prompt_cache import num_tokens
from mlx_redrafter.target.caches.recurrent import RecurrentCache
from mlx_redrafter.target.caches.sliding import SlidingCache
from mlx_redrafter.target.caches.tree_cache import parts_of
from mlx_redrafter.target.target import Target
from tests.helpers.calls import at_call
from tests.helpers.drafts import RandomShapes, Scripted, use_policy
from tests.helpers.equality import Scored, assert_same_tokens, ids, stock_tokens, stream, tokens
from tests.helpers.few_shapes import compile_passes, use_few_shapes
from tests.helpers.models import random_drafter, wrapped_tokenizer
from tests.models import tiny_models
from tests.models.test_architectures import TOLERANCE, VISIBLE, disagreement
from tests.models.test_layer_kinds import KINDS
from tests.models.tiny_models import VOCAB_SIZE, WINDOW, WITH_WINDOWS, build, tiny_config
from tests.models.trees import PROMPT, branching_tree, read_by_stock, rows_of

NUM_TOKENS = 22
# What continues a text: single tokens, then chunks.
CHUNK = [9, 8, 7, 6, 5, 4, 3]
WITH_ROWS = [name for name in KINDS if name not in ("mamba", "mamba2")]
SAMPLERS: list[dict[str, Any]] = [{"temp": 0.7}, {"temp": 1.0, "top_p": 0.9}]
# Llamas whose rows are quantised from the first token on, inside the prompt, at its end, and later.
QUANTISED = {
    f"{bits} bits from {start}": Quantisation(bits, tiny_models.GROUP_SIZE, start)
    for bits in (8, 4)
    for start in (0, 5, len(PROMPT), len(PROMPT) + 8)
}
# Share of codes that may differ: a row that differs by rounding may get another one.
FEW_CODES = 1e-3


class AnyShapes(RandomShapes):
    """Trees of any shape, of which a cache does not take those across the first quantised row."""

    def observe(self, step: Any) -> None:
        """Nothing: what was verified instead is none of the policy's choice."""


def config_of(name: str) -> tiny_models.Config:
    """The config of a family that has a layer with a window or a state, or of other layers."""
    if name == "windows alone":
        return {
            **tiny_models.windowed_config("muse_glimmer"),
            "layer_types": ["sliding_attention"] * 2,
        }
    if name == "states around rows":
        types = ["mamba", "mamba", "attention", "mamba"]
        return {**tiny_config("granitemoehybrid"), "num_hidden_layers": 4, "layer_types": types}
    if name in QUANTISED:
        return tiny_models.wide_config("llama")
    make = tiny_models.windowed_config if name in WITH_WINDOWS else tiny_models.long_config
    return make(name)


def options_of(name: str) -> dict[str, Any]:
    """Options of this package and of mlx-lm that say which rows are quantised."""
    if name not in QUANTISED:
        return {}
    bits, group_size, start = astuple(QUANTISED[name])
    return {"kv_bits": bits, "kv_group_size": group_size, "quantized_kv_start": start}


@functools.cache
def written(name: str) -> list[int]:
    """What stock mlx-lm writes after `PROMPT`, greedily."""
    return ids(stock_tokens(build(config_of(name)), PROMPT, 40, **options_of(name)))


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def continue_with_stock(model: nn.Module, cache: list[Any]) -> list[Scored]:
    """What stock mlx-lm writes from a cache, token by token, and after a prompt in chunks."""
    single = stock_tokens(model, CHUNK[:1], 4, prompt_cache=cache)
    return single + stock_tokens(model, CHUNK, 4, prompt_cache=cache, prefill_step_size=3)


def codes_of(packed: mx.array, bits: int) -> mx.array:
    """Codes of 8 or 4 bits, one a number."""
    return (packed[..., None] >> mx.arange(0, 32, bits)) & (2**bits - 1)


def assert_continues_alike(
    model: nn.Module, found: list[Any], expected: list[Any], oldest: int = 0
) -> None:
    """Two caches hold the same rows from ``oldest`` on, and mlx-lm goes on from both alike.

    Of quantised rows, which are in layers of that kind alone, nearly all codes are the same.
    """
    is_quantised = isinstance(expected[0], QuantizedKVCache)
    for layer, other in zip(found, expected, strict=True):
        assert (type(layer), num_tokens([layer])) == (type(other), num_tokens([other]))
        if is_quantised:
            assert (layer.bits, layer.group_size) == (other.bits, other.group_size)
            for rows, truth in zip(layer.keys_and_values(), other.keys_and_values(), strict=True):
                codes, others = (codes_of(part[0], layer.bits) for part in (rows, truth))
                assert mx.mean(codes != others).item() <= FEW_CODES
            continue
        for rows, truth in zip(rows_of(layer), rows_of(other), strict=True):
            assert disagreement(rows[..., oldest:, :], truth[..., oldest:, :]) <= TOLERANCE
    expected_text, text = (continue_with_stock(model, cache) for cache in (expected, found))
    assert_same_tokens(expected_text, ids(text), "continued")
    for (_, log_probs), (_, truth) in zip(text, expected_text, strict=True):
        assert disagreement(log_probs, truth) <= (VISIBLE if is_quantised else TOLERANCE)


def assert_text_and_cache(
    model: nn.Module, prompt: list[int], drafter: Any, length: int, own: Any, **shape: Any
) -> None:
    """A text and the cache after it are stock mlx-lm's; ``own`` says which rows are quantised."""
    stock_cache, cache = make_prompt_cache(model), make_prompt_cache(model)
    stock = stock_tokens(model, prompt, length, prompt_cache=stock_cache, **own)
    options = {"max_tokens": length, "prompt_cache": cache, **own, **shape}
    found = list(stream(model, prompt, drafter, **options))
    assert_same_tokens(stock, [response.token for response in found])
    for response, (_, log_probs) in zip(found, stock, strict=True):
        assert disagreement(response.logprobs, log_probs) <= (VISIBLE if own else TOLERANCE)
    assert_continues_alike(model, cache, stock_cache)


def assert_holds(
    model: nn.Module,
    cache: list[Any],
    held: list[int],
    oldest: int = 0,
    quantisation: Quantisation | None = None,
) -> None:
    """A cache is that of stock mlx-lm, which read the same text token by token."""
    stock = make_prompt_cache(model)
    for token in held:
        read_by_stock(model, [token], stock, quantisation)
    assert_continues_alike(model, cache, stock, oldest)


def test_the_families_are_known():
    windows, states = set(), set()
    for name in SUPPORTED:
        layers = parts_of(make_prompt_cache(build(tiny_config(name, SUPPORTED[name][0]))))
        if any(isinstance(layer, ArraysCache) for layer in layers):
            states.add(name)
        elif any(isinstance(layer, RotatingKVCache | ChunkedKVCache) for layer in layers):
            windows.add(name)
    assert states == set(tiny_models.WITH_STATES)
    assert windows == {name for name, extra in WITH_WINDOWS.items() if not extra}


# Around the window, and of several.
LENGTHS = WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW


@pytest.mark.parametrize(
    ("name", "length", "has_few_shapes"),
    [
        *(
            (*case, few)
            for case in zip(WITH_WINDOWS, itertools.cycle(LENGTHS))
            for few in (False, True)
        ),
        *zip(tiny_models.WITH_STATES, itertools.cycle([1, 2, 17]), itertools.repeat(False)),
        *((name, len(PROMPT), False) for name in QUANTISED),
    ],
)
def test_texts_of_any_shapes(monkeypatch, name, length, has_few_shapes):
    """Trees of all sizes with plain steps between, over several wraps, and the cache after them."""
    monkeypatch.setattr(ChunkedKVCache, "step", 32)  # so that buffers are copied, too
    if has_few_shapes:
        use_few_shapes(monkeypatch)
        compile_passes(monkeypatch, uses=2)
    model, prompt, own = build(config_of(name)), prompt_of(length), options_of(name)
    use_policy(monkeypatch, AnyShapes(length) if own else RandomShapes(length))
    drafter = Scripted(ids(stock_tokens(model, prompt, NUM_TOKENS, **own)), VOCAB_SIZE, 0.8)
    assert_text_and_cache(model, prompt, drafter, NUM_TOKENS, own)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *itertools.product(["gemma3_text", "gpt_oss", "llama"], SAMPLERS),
        *zip([*KINDS, *QUANTISED], itertools.cycle(SAMPLERS)),
    ],
)
def test_sampled_texts(monkeypatch, name, sampling):
    """With seeds and with a sampler of mlx-lm, drafts or not."""
    model, own = build(config_of(name)), options_of(name)
    options = {"seed": 5, "max_tokens": NUM_TOKENS, **sampling, **own}
    plain = tokens(model, PROMPT, **options)
    mx.random.seed(5)
    stock = stock_tokens(model, PROMPT, NUM_TOKENS, sampler=make_sampler(**sampling), **own)
    use_policy(monkeypatch, AnyShapes(3) if own else RandomShapes(3))
    assert tokens(model, PROMPT, Scripted(plain, VOCAB_SIZE, 0.8), **options) == plain
    mx.random.seed(5)
    options = {"sampler": make_sampler(**sampling), "max_tokens": NUM_TOKENS, **own}
    assert_same_tokens(stock, tokens(model, PROMPT, Scripted(ids(stock), VOCAB_SIZE), **options))


@pytest.mark.parametrize(
    ("name", "has_drafts"),
    [
        *itertools.product(["gemma3_text", "gemma3n", "iquestloopcoder", "llama4"], [False, True]),
        *((name, True) for name in WITH_ROWS),
        *((name, False) for name in WITH_ROWS[::3]),
        *((name, True) for name in ("8 bits from 0", "8 bits from 20")),
    ],
)
def test_conversations_of_several_turns(name, has_drafts):
    model = build(config_of(name))
    ours, stock = make_prompt_cache(model), make_prompt_cache(model)
    for turn, question in enumerate([[5, 17, 3], [8], [40, 2], prompt_of(20), [7], [1, 2]]):
        own = options_of(name)
        expected = stock_tokens(model, question, 5 + turn, prompt_cache=stock, **own)
        drafter = Scripted(ids(expected), VOCAB_SIZE) if has_drafts else None
        shape = {"beam_width": 4, "beam_length": 5, "tree_nodes": 9}
        options = {"max_tokens": 5 + turn, "prompt_cache": ours, **shape, **own}
        assert_same_tokens(expected, tokens(model, question, drafter, **options), turn)
    assert_continues_alike(model, ours, stock)


FROM_20 = "8 bits from 20"
CLOSED = {"trees": (1, 2, 3, 5, 7, 12), "both": (2, 6, 13), "plain": (1, 2)}


# In the prompt's token, inside a path, behind one, and with a token or a root after them. Steps
# without drafts are all alike after the first.
# Rows may be quantised already if the path that is cut went beyond their start.
@pytest.mark.parametrize(
    ("name", "policy", "count"),
    [
        (name, policy, count)
        for name in ("gemma3_text", "llama4", "olmo_hybrid", "mamba2", *KINDS[-3:], FROM_20)
        for policy, counts in CLOSED.items()
        for count in counts
        if policy != "both" or name not in QUANTISED
    ],
)
def test_a_text_that_is_closed_in_the_middle(monkeypatch, name, count, policy):
    model, text = build(config_of(name)), written(name)
    cache = make_prompt_cache(model)
    if policy == "both":
        use_policy(monkeypatch, RandomShapes(count))
    shape = {"beam_width": 4, "beam_length": 6, "tree_nodes": 16} if policy == "trees" else {}
    drafter = None if policy == "plain" else Scripted(text, VOCAB_SIZE, accuracy=0.95)
    options = {"prompt_cache": cache, **shape, **options_of(name)}
    with stream(model, PROMPT, drafter, **options) as responses:
        assert [next(responses).token for _ in range(count)] == text[:count]
    held = [*PROMPT, *text[:count]]
    assert_holds(model, cache, held, quantisation=QUANTISED.get(name))


@pytest.mark.parametrize("name", ["olmo_hybrid", "mamba2"])
def test_a_text_that_is_closed_after_another_has_begun_in_chunks(name):
    model, text = build(config_of(name)), written(name)
    engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), Scripted(text, VOCAB_SIZE, 1.0))
    cache, shared = make_prompt_cache(model), engine.share()
    shape: dict[str, Any] = {"beam_width": 1, "beam_length": 6}
    with engine.stream(PROMPT, prompt_cache=cache, shared=shared, **shape) as responses:
        assert [next(responses).token for _ in range(3)] == text[:3]
        next(engine.stream(prompt_of(20), shared=shared, prefill_step_size=4))
    assert_holds(model, cache, [*PROMPT, *text[:3]])


def interrupt(patch: pytest.MonkeyPatch, owner: type, name: str, number: int) -> None:
    """Interrupt after ``number`` calls of a method."""
    at_call(patch, owner, name, Mock(side_effect=KeyboardInterrupt), number + 1)


def assert_interrupted(
    patch: pytest.MonkeyPatch,
    config: str,
    has_drafts: bool,
    when: tuple[type, str, int],
    held_in_prompt: int | None,
    oldest: int,
) -> None:
    """The cache holds tokens that were taken, in the prompt, in plain steps and inside trees."""
    model, text = build(config_of(config)), written(config)
    cache = make_prompt_cache(model)
    drafter = Scripted(text, VOCAB_SIZE, accuracy=0.95) if has_drafts else None
    options = {"prompt_cache": cache, "max_tokens": 30, "prefill_step_size": 4}
    responses, taken = stream(model, PROMPT, drafter, **options), list[int]()
    interrupt(patch, *when)
    with pytest.raises(KeyboardInterrupt):
        taken.extend(response.token for response in responses)
    patch.undo()
    held = num_tokens(cache)
    if held_in_prompt is not None:
        assert held == held_in_prompt
    else:
        assert len(PROMPT) + len(taken) - 1 <= held <= len(PROMPT) + len(taken)
    assert_holds(model, cache, [*PROMPT, *text][:held], oldest)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *itertools.product([KVCache, RotatingKVCache], [1, 2]),
        *itertools.product([FullCache, SlidingCache], [1, 2, 3, 4]),
    ],
)
def test_an_interruption_between_two_layers_with_rows(monkeypatch, kind, number, has_drafts, layer):
    when = kind, "update_and_fetch", 2 * number + layer
    held = 4 * number if kind in (KVCache, RotatingKVCache) else None  # a chunk of the prompt
    # What was a window's oldest row when the pass began is gone, and no token sees it any more.
    has_windows = kind in (RotatingKVCache, SlidingCache)
    name = "windows alone" if has_windows else "qwen3"
    assert_interrupted(monkeypatch, name, has_drafts, when, held, oldest=int(has_windows))


@pytest.mark.parametrize(
    ("kind", "number", "layer"),
    [("token", n, (n + more) % 3) for n in range(1, 7) for more in (0, 1)]
    + [("tree", n, (n + more) % 3) for n in range(4) for more in (0, 1)]
    + [("path", n, (n + more) % 3) for n in range(3, 7) for more in (0, 1)],
)
def test_an_interruption_between_two_layers_with_states(monkeypatch, kind, number, layer):
    place, is_tree = 3 * number + layer, kind != "token"
    when = (RecurrentCache, "branch", place) if is_tree else (ArraysCache, "__setitem__", 2 * place)
    if kind == "path":  # before the layers take over the states after the accepted one
        when = RecurrentCache, "expect", place
    # A chunk of the prompt, or its last token.
    held = min(4 * number, len(PROMPT) - 1) if kind != "tree" and number < 4 else None
    assert_interrupted(monkeypatch, "states around rows", is_tree, when, held, oldest=0)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_an_interruption_of_a_shared_pass_between_two_layers(monkeypatch, has_drafts, layer):
    """Texts that were in the pass, or rested, do not go on with states of which some are old."""
    name = "states around rows"
    model, text = build(config_of(name)), written(name)
    drafter = Scripted(text, VOCAB_SIZE, accuracy=0.95) if has_drafts else None
    for number in range(1, 6):
        engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), drafter)
        shared, caches = engine.share(), [engine.new_prompt_cache() for _ in range(3)]
        options = {"max_tokens": 30, "shared": shared}
        responses = [engine.stream(PROMPT, prompt_cache=cache, **options) for cache in caches]
        taken = [[next(one).token] for one in responses]
        with monkeypatch.context() as patch:
            interrupt(patch, RecurrentCache, "expect", 3 * number + layer)
            for one, tokens in zip(responses, taken, strict=True):
                with pytest.raises(KeyboardInterrupt):
                    tokens.extend(response.token for response in one)
        for cache, tokens in zip(caches, taken, strict=True):
            assert tokens == text[: len(tokens)]
            if held := num_tokens(cache):
                assert_holds(model, cache, [*PROMPT, *tokens][:held])


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5"])
def test_a_recurrent_drafter_and_lookup(name):
    model = build(config_of(name))
    stock = stock_tokens(model, PROMPT, 50)
    for drafter in (random_drafter(VOCAB_SIZE, 64), "lookup"):
        assert_same_tokens(stock, tokens(model, PROMPT, drafter, max_tokens=50))


@pytest.mark.parametrize("length", [3, WINDOW, 600])
@pytest.mark.parametrize("name", ["gemma3_text", "llama4", *KINDS, "8 bits from 0"])
def test_blank_caches_of_any_length(name, length):
    target = Target(build(config_of(name)))
    cache = blank_cache(target, length, QUANTISED.get(name))
    for shorter in (length, length - 1):
        cache.trim_to(shorter)
        with_rows = [layer for layer in parts_of(cache.stock) if not isinstance(layer, ArraysCache)]
        assert {layer.offset for layer in with_rows} <= {shorter}
        for layer in with_rows if name in WITH_WINDOWS else ():
            most = shorter if type(layer) is KVCache else WINDOW
            assert rows_of(layer)[0].shape[2] == min(shorter, most)
        outputs = target.verify(branching_tree(), cache)
        assert mx.all(mx.isfinite(outputs.logits)).item()


def test_layers_without_attention_have_no_blank_entries():
    target = Target(build(config_of("nemotron-nas")))
    cache = blank_cache(target, 600)
    assert [layer.offset for layer in cache.stock if layer.keys is not None] == [600, 600]
    outputs = target.verify(branching_tree(), cache)
    assert mx.all(mx.isfinite(outputs.logits)).item()
