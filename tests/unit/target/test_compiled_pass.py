"""Compiled passes over trees: bits, one trace for all lengths, buffers in place, and faults."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.bench.lab import memory
from mlx_redrafter.bench.lab.contexts import prefill
from mlx_redrafter.decoding.protocols import Step
from mlx_redrafter.decoding.records import Request
from mlx_redrafter.decoding.sampling import KeyedSampler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import decode
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.target.compiled_pass import CompiledPasses, with_products
from mlx_redrafter.target.hooks import install_in_attention
from mlx_redrafter.target.target import Target
from tests.helpers.few_shapes import compile_passes
from tests.models.tiny_models import build, main_rope, tiny_config
from tests.models.trees import PLAN, PROMPT, ScriptedDrafts, branching_tree, stock_tokens

# Paths that are kept in turn: in place, with nodes aside, and the root alone.
PATHS = [[0, 1, 3, 6], [0, 2, 5, 10], [0]]


def new_target(model_type: str, changes: dict[str, Any] | None = None) -> Target:
    return Target(build({**tiny_config(model_type, main_rope(model_type)), **(changes or {})}))


def verify_growing(target: Target, steps: int) -> list[mx.array]:
    """Return the logits of one tree after a sequence that grows by its paths."""
    cache = target.caches.new()
    prefill(target, mx.array(PROMPT), cache, 2048)
    found = []
    for step in range(steps):
        logits = target.verify(branching_tree(), cache).logits
        mx.eval(logits)
        cache.commit(PATHS[step % len(PATHS)])
        found.append(logits)
    return found


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", "qwen3_moe", "qwen3_5", "falcon_h1"]
)
def test_bits_are_those_of_the_operations(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    compile_passes(monkeypatch, uses=1)
    target = new_target(model_type)
    compiled = verify_growing(target, 12)
    assert len(target.compiled.passes) <= 3  # a sliding window fills its first bucket
    monkeypatch.setattr(mx, "compile", lambda function: function)
    target.compiled = CompiledPasses()
    for found, expected in zip(compiled, verify_growing(target, 12), strict=True):
        assert mx.array_equal(found, expected)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_with_weights_have_the_bits_of_layers(dtype: mx.Dtype, has_bias: bool) -> None:
    layer = nn.Linear(48, 40, bias=has_bias)
    layer.set_dtype(dtype)
    for shape in ((1, 9, 48), (2, 3, 48), (9, 48)):
        x = mx.random.normal(shape, key=mx.random.key(0)).astype(dtype)
        found = with_products(nn.Sequential(layer), lambda inputs: [layer(*inputs)], [x])
        assert mx.array_equal(*found, layer(x))
    assert type(layer) is nn.Linear


def test_one_trace_serves_all_lengths_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_passes(monkeypatch, uses=3)
    target = new_target("llama")
    calls = 0

    def count(call: Any, *args: Any, **options: Any) -> mx.array:
        nonlocal calls
        calls += 1
        result: mx.array = call(*args, **options)
        return result

    install_in_attention(target.model, count)
    verify_growing(target, 70)
    # The prompt and its last token; two passes before; the trace; operations at two lengths.
    assert calls == len(target.model.layers) * (2 + 2 + 1 + 2)


def test_targets_of_a_model_share_passes_until_weights_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_passes(monkeypatch, uses=1)
    first = new_target("qwen3_5")
    model, passes = first.model, first.share_passes(None)
    found = verify_growing(first, 4)
    del first
    later = Target(model)
    assert later.share_passes(passes) is passes
    passes.target = None
    with monkeypatch.context() as patch:
        patch.setattr(Target, "process_trees", None)  # no further trace
        for one, again in zip(found, verify_growing(later, 4), strict=True):
            assert mx.array_equal(one, again)
    norm = later.modules.final_norm
    norm.weight = 2 * norm.weight
    newest = Target(model)
    assert newest.share_passes(passes) is not passes
    for one, other in zip(found, verify_growing(newest, 4), strict=True):
        assert mx.allclose(2 * one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("paths", [[[0]], PATHS], ids=["in_place", "aside"])
def test_buffers_are_updated_in_place(
    monkeypatch: pytest.MonkeyPatch, paths: list[list[int]]
) -> None:
    monkeypatch.setattr(memory, "LARGE", 2**27)
    assert memory.update_large_buffers(paths).holds


def test_a_target_is_freed_with_its_last_name(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_passes(monkeypatch, uses=1)
    target = new_target("qwen3_5")
    verify_growing(target, 2)
    assert target.compiled.passes
    model = ref(target.model)
    gc.disable()
    try:
        del target
        assert model() is None
    finally:
        gc.enable()


def test_other_bits_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_passes(monkeypatch, uses=2)
    target = new_target("llama")
    expected = verify_growing(target, 1)

    def inexact(function: Any) -> Any:
        return lambda inputs: [one * (1 + 2**-20) for one in function(inputs)]

    monkeypatch.setattr(mx, "compile", inexact)
    target.compiled = CompiledPasses()
    found = verify_growing(target, 4)
    assert target.compiled.fault == "a compiled pass rounds in another way than its operations"
    assert not target.compiled.passes
    assert mx.array_equal(found[0], expected[0])


class Watched(FixedPolicy):
    """A fixed policy that keeps what it observes."""

    def observe(self, step: Step) -> None:
        seconds.append(step.seconds)


seconds: list[float | None] = []


def test_first_uses_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_passes(monkeypatch, uses=3)
    target = new_target("llama")
    stock = stock_tokens(target.model, 20, make_prompt_cache(target.model))
    seconds.clear()
    text = SequenceDecoder(
        target,
        target.caches.new(),
        KeyedSampler(SamplingParams(), target.vocab_size),
        Request(PROMPT, max_tokens=20),
        ScriptedDrafts(stock),
        Watched(PLAN),
    )
    assert [token.id for token in decode(text)] == stock
    # The first use, and the third one, which compiles.
    assert [number for number, one in enumerate(seconds) if one is None] == [0, 2]
    assert len(seconds) > 4
