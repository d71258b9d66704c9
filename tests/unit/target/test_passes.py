"""Passes over a model: states of layers, few shapes, compiled ones, and those that come early."""

from contextlib import closing
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter import Engine, load
from mlx_redrafter.bench.lab import memory
from mlx_redrafter.bench.lab.contexts import prefill
from mlx_redrafter.decoding import prefill as decoding_prefill
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.decoding.step import decode
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.plans import FixedPolicy
from mlx_redrafter.target.compiled_pass import CompiledPasses, with_products
from mlx_redrafter.target.few_shapes import BUCKET, bucket
from mlx_redrafter.target.hooks import FINAL, install_in_attention
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TokenTree
from tests.helpers.calls import at_call
from tests.helpers.costs import stop_clock
from tests.helpers.equality import ids, stock_tokens
from tests.helpers.few_shapes import compile_passes, use_few_shapes
from tests.helpers.models import tiny_llama
from tests.models import trees
from tests.models.tiny_models import build, main_rope, tiny_config
from tests.models.trees import PROMPT, DraftsOnDevice, Followed, rows_of, sequence_of

# Paths that are kept in turn: in place, with nodes aside, and the root alone.
PATHS = [[0, 1, 3, 6], [0, 2, 5, 10], [0]]


def new_target(model_type: str) -> Target:
    return Target(build(tiny_config(model_type, main_rope(model_type))))


def verify_growing(target: Target, steps: int) -> list[mx.array]:
    """Return the logits of one tree after a sequence that grows by its paths."""
    cache = target.caches.new()
    prefill(target, mx.array(PROMPT), cache, 2048)
    found = []
    for step in range(steps):
        logits = target.verify(trees.branching_tree(), cache).logits
        mx.eval(logits)
        cache.commit(PATHS[step % len(PATHS)])
        found.append(logits)
    return found


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", "qwen3_moe", "qwen3_5", "falcon_h1"]
)
def test_bits_are_those_of_the_operations(monkeypatch, model_type):
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
def test_products_with_weights_have_the_bits_of_layers(dtype, has_bias):
    layer = nn.Linear(48, 40, bias=has_bias)
    layer.set_dtype(dtype)
    for shape in ((1, 9, 48), (2, 3, 48), (9, 48)):
        x = mx.random.normal(shape, key=mx.random.key(0)).astype(dtype)
        found = with_products(nn.Sequential(layer), lambda inputs: [layer(*inputs)], [x])
        assert mx.array_equal(*found, layer(x))
    assert type(layer) is nn.Linear


def test_one_trace_serves_all_lengths_of_a_bucket(monkeypatch):
    compile_passes(monkeypatch, uses=3)
    target = new_target("llama")
    calls: list[int] = []

    def count(call: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return call(*args, **options)

    install_in_attention(target.model, count)
    verify_growing(target, 70)
    # The prompt and its last token; two passes before; the trace; operations at two lengths.
    assert len(calls) == len(target.model.layers) * (2 + 2 + 1 + 2)


def test_targets_of_a_model_share_passes_until_weights_change(monkeypatch):
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
def test_buffers_are_updated_in_place(monkeypatch, paths):
    monkeypatch.setattr(memory, "LARGE", 2**27)
    assert memory.update_large_buffers(paths).holds


@pytest.mark.usefixtures("no_collector")
def test_a_target_is_freed_with_its_last_name(monkeypatch):
    compile_passes(monkeypatch, uses=1)
    target = new_target("qwen3_5")
    verify_growing(target, 2)
    assert target.compiled.passes
    model = ref(target.model)
    del target
    assert model() is None


def test_other_bits_are_a_fault(monkeypatch):
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


def test_first_uses_are_not_timed(monkeypatch):
    compile_passes(monkeypatch, uses=3)
    target = new_target("llama")
    stock = ids(stock_tokens(target.model, PROMPT, 20))
    seconds: list[float | None] = []
    monkeypatch.setattr(FixedPolicy, "observe", lambda _, step: seconds.append(step.seconds))
    text = sequence_of(target, PROMPT, DraftsOnDevice([*PROMPT, *stock]), max_tokens=20)
    assert [token.id for token in decode(text)] == stock
    # The first use, and the third one, which compiles.
    assert [number for number, one in enumerate(seconds) if one is None] == [0, 2]
    assert len(seconds) > 4


# Largest difference of entries from those of plain decoding, relative to the largest.
TOLERANCE = 1e-4
# Tokens of a text.
NUM_TOKENS = 40


def begin(
    target: Target,
    drafts: DraftsOnDevice | None,
    cache: list[Any] | None = None,
    stop: int | None = None,
    **params: Any,
) -> SequenceDecoder:
    ends = frozenset() if stop is None else frozenset({stop})
    options: dict[str, Any] = {"max_tokens": params.pop("max_tokens", NUM_TOKENS)}
    options |= {"stop_tokens": ends, "keeps_cache": True, "cache": target.caches.new(cache)}
    return sequence_of(target, PROMPT, drafts, SamplingParams(**params), **options)


def text_of(sequence: SequenceDecoder) -> list[int]:
    return [token.id for token in decode(sequence)]


@pytest.mark.parametrize(
    ("model_type", "is_chain"),
    [("llama", True), ("llama", False), ("gemma3_text", False), ("falcon_h1", False)],
)
def test_texts_and_caches_are_those_of_plain_decoding(monkeypatch, model_type, is_chain):
    """At every end: by length, by a stop token inside a path, and by the caller."""
    compile_passes(monkeypatch, uses=1)
    target = new_target(model_type)
    followed = Followed(monkeypatch)
    for temp in (0.0, 1.0):
        text = text_of(begin(target, None, temp=temp, seed=3))
        for number, end in enumerate((NUM_TOKENS, 22, 21)):
            stop, first = text[end - 1], text.index(text[end - 1]) + 1
            options: dict[str, Any] = {"stop": stop} if number % 2 else {"max_tokens": end}
            caches = [make_prompt_cache(target.model) for _ in range(2)]
            drafts = DraftsOnDevice([*PROMPT, *text], is_chain)
            sequences = [
                begin(target, one, cache, temp=temp, seed=3, **options)
                for one, cache in zip((None, drafts), caches, strict=True)
            ]
            expected = text[: first if number % 2 else end]
            assert [text_of(one) for one in sequences] == [expected, expected]
            check_caches(*caches)
    assert followed.count > 30


def test_a_caller_leaves_at_any_token(monkeypatch):
    """Caches then hold what the caller has taken, though a later pass is in flight."""
    compile_passes(monkeypatch, uses=1)
    target = new_target("qwen3_5")
    text = text_of(begin(target, None))
    for count in range(6, 12):
        caches = [make_prompt_cache(target.model) for _ in range(2)]
        plain = begin(target, None, caches[0], max_tokens=count)
        drafted = begin(target, DraftsOnDevice([*PROMPT, *text]), caches[1])
        with closing(decode(drafted)) as tokens:
            found = [next(tokens).id for _ in range(count)]
        assert found == text_of(plain)
        check_caches(*caches)


def test_nan_after_a_path_ends_the_text(monkeypatch):
    """With the error and after the tokens of plain decoding."""
    compile_passes(monkeypatch, uses=1)
    target = new_target("llama")
    text = text_of(begin(target, None))
    first = next(i for i in range(12, 40) if text[i] not in {*PROMPT, *text[:i]})
    followed, compute = Followed(monkeypatch), Target.compute

    def compute_nan(self: Target, tokens: mx.array, *others: Any) -> TargetOutputs:
        is_bad, found = (tokens == text[first])[..., None], compute(self, tokens, *others)
        return found._replace(logits=mx.where(is_bad, mx.nan, found.logits))

    monkeypatch.setattr(Target, "compute", compute_nan)
    for drafts in (None, DraftsOnDevice([*PROMPT, *text])):
        tokens = decode(begin(target, drafts))
        found: list[int] = []
        while len(found) <= first:
            found.append(next(tokens).id)
        assert found == text[: first + 1]
        with pytest.raises(NonFiniteError, match="in the text"):
            next(tokens)
    assert followed.count > 2


def check_caches(expected: list[Any], found: list[Any]) -> None:
    for wanted, layer in zip(expected, found, strict=True):
        for rows, own in zip(rows_of(wanted), rows_of(layer), strict=True):
            assert rows.shape == own.shape
            assert mx.max(mx.abs(rows - own)) <= TOLERANCE * mx.max(mx.abs(rows))


TEXT = [5, 17, 3, 60, 9, 12, 7]
LAYERS = (2, 0, FINAL)


def _layer_inputs(model: Any, tokens: list[int]) -> mx.array:
    """Inputs of layers 2 and 0 and the final output, one layer after another."""
    inputs = [model.model.embed_tokens(mx.array([tokens]))]
    for layer in model.model.layers:
        inputs.append(layer(inputs[-1], "causal", None))
    return mx.concatenate([inputs[2], inputs[0], model.model.norm(inputs[-1])], axis=-1)[0]


class _States(DraftsOnDevice):
    """Keeps the states of a prompt, its last token included."""

    layers = LAYERS

    def __init__(self) -> None:
        super().__init__([])
        self.reader: Any = self
        self.found: list[mx.array] = []

    def read(self, states: mx.array) -> None:
        self.found.append(states)

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        if self.num_drafted == 0:
            self.found.append(flight.path_states)
        return super().propose(flight, plan, noise)


def test_states_of_prompts_that_share_their_passes(monkeypatch):
    monkeypatch.setattr(decoding_prefill, "MAX_END", 3)
    model = tiny_llama(seed=4)
    target = Target(model)
    target.modules.watch(LAYERS)
    texts = []
    for length in (12, 7, 8, 1, 7):
        prompt = [*TEXT, *range(20, 30)][:length]
        texts.append(sequence_of(target, prompt, _States(), max_tokens=3))
    scheduler = Scheduler(target)
    scheduler.begin(texts)
    while not all(text.is_finished for text in texts):
        for text in scheduler.step_all():
            text.take()
    for text in texts:
        found = mx.concatenate(text.drafting.found)
        assert mx.allclose(found, _layer_inputs(model, text.request.prompt), atol=1e-5).item()


def test_states_are_those_of_the_layers_and_logits_stay():
    model = tiny_llama(seed=4)
    plain = Target(tiny_llama(seed=4))
    target = Target(model)
    target.modules.watch(LAYERS)
    prompt = mx.array(TEXT)
    expected = _layer_inputs(model, [*TEXT, 8, 9])
    cache, other = target.caches.new(), plain.caches.new()
    parts = prompt[:4], prompt[4:6]
    chunks = [target.process_chunk(part, cache, LAYERS).states for part in parts]
    outputs = target.advance(prompt[6:], cache, LAYERS)
    reference = prefill(plain, prompt, other, 4)
    assert reference.states is None
    assert mx.array_equal(outputs.logits, reference.logits).item()
    states = mx.concatenate([*chunks, outputs.states])
    assert mx.allclose(states, expected[: len(TEXT)], atol=1e-5).item()
    tree = TokenTree.of([8, 9, 30], [0, 0, 0])
    outputs, reference = target.verify(tree, cache, LAYERS), plain.verify(tree, other)
    assert mx.array_equal(outputs.logits, reference.logits).item()
    assert mx.allclose(outputs.states[:2], expected[len(TEXT) :], atol=1e-5).item()


PROMPTS = ["Once upon a time there was a small dragon", "The capital of France is"]
# Bounds of the number of shapes, of which MLX keeps 256.
MAX_FIXED, MAX_DEFAULT = 5, 24


@given(st.integers(1, 10**6))
def test_buckets_waste_little(length):
    entries = bucket(length)
    assert length <= entries < length + max(BUCKET, length / 8)
    assert entries % BUCKET == 0
    assert bucket(entries) == entries
    # And they are few.
    assert len({bucket(length) for length in range(1, 2049)}) == 8
    assert len({bucket(length) for length in range(2049, 16_385)}) == 24


@pytest.mark.parametrize(
    ("shape", "num_texts", "most"),
    [({"beam_width": 1, "beam_length": 5}, 1, MAX_FIXED), ({}, len(PROMPTS), MAX_DEFAULT)],
)
def test_a_text_has_few_shapes(monkeypatch, shape, num_texts, most):
    stop_clock(monkeypatch)
    use_few_shapes(monkeypatch, BUCKET)
    model, tokenizer, drafter = load()
    engine = Engine(model, tokenizer, drafter)
    num_steps, shapes = 0, set[tuple[Any, ...]]()
    masks: dict[int, mx.array] = {}

    def note(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> None:
        mask = options.get("mask")
        if q.shape[2] > 1 and isinstance(mask, mx.array):  # verifies a tree
            shapes.add((q.shape, k.shape, mask.shape, mask.dtype))
            masks[id(mask)] = mask

    at_call(monkeypatch, mx.fast, "scaled_dot_product_attention", note)
    for prompt in PROMPTS[:num_texts]:
        tokens = tokenizer.encode(prompt)
        *_, last = found = list(engine.stream(tokens, max_tokens=120, **shape))
        stock = stock_tokens(model, tokens, len(found))
        assert [response.token for response in found] == ids(stock)
        num_steps += last.stats.steps
    assert num_steps > 50
    assert 1 <= len(shapes) <= most
    assert all(dtype == mx.float32 for *_, dtype in shapes)
    assert len(masks) <= num_steps, "one mask per step, which all layers share"
