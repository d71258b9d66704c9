"""Quantised keys and values: trees, texts and prompt caches against stock mlx-lm with ``kv_bits``.

A row that differs by rounding may get another code, in mlx-lm's own passes over several tokens as
in those over trees. Seeds are fixed; of these models no text depends on such a code.
"""

import inspect
from collections.abc import Callable
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from mlx_redrafter import DraftModel
from mlx_redrafter.engine import engine, stored_costs
from mlx_redrafter.engine.stored_costs import blank_cache
from mlx_redrafter.errors import ConfigError, UnsupportedTargetError
from mlx_redrafter.generation_options import GenerationOptions, Quantisation
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree
from tests.helpers.calls import at_call
from tests.helpers.costs import stop_clock
from tests.helpers.drafts import Scripted
from tests.helpers.equality import assert_same_tokens, ids, stock_tokens, tokens
from tests.helpers.models import random_drafter, wrapped_tokenizer
from tests.models import tiny_models
from tests.models.test_architectures import VISIBLE, disagreement
from tests.models.test_texts import assert_continues_alike, assert_text_and_cache
from tests.models.tiny_models import VOCAB_SIZE, build, tiny_config, wide_config, windowed_config
from tests.models.trees import PROMPT, branching_tree, decode_paths, verify_after_prompt

NUM_TOKENS = 50
# From the first token on, inside the prompt, at its end, inside the text.
STARTS = [0, 5, len(PROMPT), len(PROMPT) + 20]
# Latent attention, learned positions, one head of keys, chunks, layers without rows, and others.
FAMILIES = ["deepseek_v2", "gpt2", "gpt_bigcode", "llama4", "nemotron-nas", "phi3", "qwen3_moe"]
TOKENIZER = wrapped_tokenizer(VOCAB_SIZE)


def options_of(bits: int, start: int) -> dict[str, Any]:
    """The options of mlx-lm and of this package."""
    return {"kv_bits": bits, "kv_group_size": tiny_models.GROUP_SIZE, "quantized_kv_start": start}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build(wide_config("llama"))


def test_options_are_those_of_mlx_lm():
    stock = inspect.signature(generate_step).parameters
    for name in ("kv_bits", "kv_group_size", "quantized_kv_start"):
        assert getattr(GenerationOptions, name) == stock[name].default


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_tree_logits(model_type, bits):
    model, tree = build(wide_config(model_type)), branching_tree()
    quantisation = Quantisation(bits, tiny_models.GROUP_SIZE, 0)
    expected = decode_paths(model, tree, quantisation).logits
    found = verify_after_prompt(Target(model), tree, quantisation).logits
    assert disagreement(found, expected) <= VISIBLE
    plain = decode_paths(model, tree).logits
    assert disagreement(plain, expected) > 2 * VISIBLE


# Scripted drafts are those of `test_texts`.
DRAFTERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "recurrent": lambda: random_drafter(VOCAB_SIZE, 128),
    "lookup": lambda: "lookup",
    "draft model": lambda: DraftModel(build(tiny_config("llama")), TOKENIZER),
}
FIXED = {"beam_width": 4, "beam_length": 5, "tree_nodes": 9}


@pytest.mark.parametrize(
    ("drafter", "bits", "start", "shape"),
    [
        (drafter, bits, STARTS[(number + turn) % len(STARTS)], shape)
        for number, drafter in enumerate(DRAFTERS)
        for turn, (bits, shape) in enumerate([(8, FIXED), (4, FIXED), (8, {})])
    ],
)
def test_texts_and_the_caches_after_them(monkeypatch, model, drafter, bits, start, shape):
    stop_clock(monkeypatch)
    own = options_of(bits, start) | {"prefill_step_size": 4}
    assert_text_and_cache(model, PROMPT, DRAFTERS[drafter](), NUM_TOKENS, own, **shape)


def test_no_tree_has_nodes_on_both_sides_of_the_start(monkeypatch, model):
    start, trees = STARTS[-1], []

    def note(target: Target, tree: TokenTree, cache: Any, layers: Any) -> None:
        kinds = {type(layer) for layer in cache.stock}
        trees.append((cache.length, cache.length + tree.max_depth, kinds))

    at_call(monkeypatch, Target, "verify", note)
    options = options_of(4, start)
    stock = stock_tokens(model, PROMPT, NUM_TOKENS, **options)
    drafter = Scripted(ids(stock), VOCAB_SIZE, accuracy=0.8)
    options |= {"max_tokens": NUM_TOKENS, **FIXED}
    assert_same_tokens(stock, tokens(model, PROMPT, drafter, **options))
    before = [deepest for _, deepest, kinds in trees if kinds == {KVCache}]
    after = [root for root, _, kinds in trees if kinds == {QuantizedKVCache}]
    assert before
    assert after
    assert len(before) + len(after) == len(trees)
    assert max(before) < start <= min(after)


def quantised_cache(model: nn.Module, **options: Any) -> list[Any]:
    """A cache that stock mlx-lm has quantised, and the text that it holds."""
    cache = make_prompt_cache(model)
    stock_tokens(model, PROMPT, 3, prompt_cache=cache, **options)
    return cache


@pytest.mark.parametrize("options", [{}, options_of(8, 0), options_of(8, 5000)], ids=str)
def test_a_quantised_cache_from_outside(model, options):
    caches = [quantised_cache(model, **options_of(8, 0)) for _ in range(2)]
    stock = stock_tokens(model, [9], NUM_TOKENS, prompt_cache=caches[0], **options)
    given = {"max_tokens": NUM_TOKENS, "prompt_cache": caches[1], **FIXED, **options}
    assert_same_tokens(stock, tokens(model, [9], Scripted(ids(stock), VOCAB_SIZE), **given))
    assert_continues_alike(model, caches[1], caches[0])


def test_a_plain_cache_from_outside_gives_its_rows_away(model):
    cache = quantised_cache(model)
    layers = list(cache)
    tokens(model, [9], prompt_cache=cache, max_tokens=2, **options_of(8, 0))
    assert [type(layer) for layer in cache] == [QuantizedKVCache] * len(layers)
    assert all(layer.empty() and layer.offset == 0 for layer in layers)


@pytest.mark.parametrize(("start", "kind"), [(len(PROMPT), QuantizedKVCache), (13, KVCache)])
def test_steps_are_timed_with_the_rows_that_a_text_begins_with(monkeypatch, model, start, kind):
    made = []

    def watch(target: Target, *args: Any) -> Any:
        made.append(blank_cache(target, *args))
        return made[-1]

    monkeypatch.setattr(stored_costs, "blank_cache", watch)
    monkeypatch.setattr(engine, "step_costs", stored_costs.step_costs)
    monkeypatch.setattr(stored_costs, "load_or_time", lambda *args: args[-1]())
    tokens(model, PROMPT, "lookup", max_tokens=2, **options_of(8, start))
    assert [{type(layer) for layer in cache.stock} for cache in made] == [{kind}]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (windowed_config("gpt_oss"), "RotatingKVCache Quantization NYI"),
        (windowed_config("gemma3_text"), "RotatingKVCache Quantization NYI"),
        (tiny_config("llama"), "divisible by the quantization group size 32"),
        (wide_config("deepseek_v3"), "'list' object has no attribute"),
    ],
    ids=["attention sinks", "windows", "small heads", "latent attention"],
)
def test_models_that_mlx_lm_cannot_quantise(config, reason):
    with pytest.raises(UnsupportedTargetError, match=f"{reason}.*; leave out kv_bits or"):
        tokens(build(config), PROMPT, **options_of(8, 5000))


def test_prompt_caches_that_do_not_go_with_the_options(model):
    options = options_of(8, 0)
    with pytest.raises(ConfigError, match="4 bits in groups of 32; give the same kv_bits"):
        tokens(model, PROMPT, prompt_cache=quantised_cache(model, **options_of(4, 0)), **options)
    with pytest.raises(ConfigError, match="must be a list with kv_bits"):
        tokens(model, PROMPT, prompt_cache=tuple(make_prompt_cache(model)), **options)
    draft = build(wide_config("llama"), seed=1)
    layers = [*make_prompt_cache(model), *quantised_cache(draft, **options)]
    with pytest.raises(UnsupportedTargetError, match=r"draft model's layers.*QuantizedKVCache\("):
        tokens(model, PROMPT, DraftModel(draft, TOKENIZER), prompt_cache=layers)


Damage = Callable[[QuantizedKVCache], object]
DAMAGE: dict[str, tuple[Damage, str]] = {
    "bits": (lambda layer: setattr(layer, "bits", 4), "heads of size .*, the model's are"),
    "no bits": (lambda layer: setattr(layer, "bits", "8"), "expected KVCache"),
    "rows": (lambda layer: setattr(layer, "offset", 999), "holds 999 tokens, but has"),
    "no rows": (lambda layer: setattr(layer, "keys", None), "holds .* tokens, but has 0 entries"),
    "parts": (lambda layer: setattr(layer, "keys", layer.keys[:2]), "in layer 0, the model's are"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_quantised_caches(model, damage):
    cache = quantised_cache(model, **options_of(8, 0))
    spoil, message = DAMAGE[damage]
    spoil(cache[0])
    with pytest.raises((ConfigError, UnsupportedTargetError), match=message):
        tokens(model, PROMPT, prompt_cache=cache)


def test_layers_of_a_draft_model_stay_as_they_are(model):
    options = options_of(8, len(PROMPT) + 3)
    draft = build(tiny_config("llama"))
    stock_cache, target_layers = make_prompt_cache(model), make_prompt_cache(model)
    cache = [*target_layers, *make_prompt_cache(draft)]
    for question in (PROMPT, [9]):
        stock = stock_tokens(model, question, 9, prompt_cache=stock_cache, **options)
        drafter = DraftModel(draft, TOKENIZER)
        found = tokens(model, question, drafter, prompt_cache=cache, max_tokens=9, **options)
        assert_same_tokens(stock, found)
    kinds = [QuantizedKVCache] * len(target_layers) + [KVCache] * (len(cache) - len(target_layers))
    assert [type(layer) for layer in cache] == kinds
    assert {layer.offset for layer in cache} == {stock_cache[0].offset}
