"""Texts that share their forward passes are those that each has alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

from mlx_redrafter import Engine, generate, generate_batch, load
from mlx_redrafter.decoding.records import Request
from mlx_redrafter.decoding.sampling import KeyedSampler
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.policy.adaptive import Explorer
from mlx_redrafter.policy.plans import LONGEST, SHORTEST, WIDEST, Choice
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.trees.tree import TreeBatch
from tests.helpers.memory import peak_of
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

VOCAB_SIZE = 64
SAMPLING = [{}, {"temp": 1.0, "seed": 7}, {"temp": 0.6, "top_p": 0.9, "seed": 1}]


def _prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def _watch_passes(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[tuple[int, ...]]:
    """Shapes of the tokens of a model's forward passes from now on."""
    shapes: list[tuple[int, ...]] = []
    process = type(model).__call__

    def watched(self: Any, tokens: mx.array, *rest: Any, **options: Any) -> mx.array:
        shapes.append(tokens.shape)
        return process(self, tokens, *rest, **options)

    monkeypatch.setattr(type(model), "__call__", watched)
    return shapes


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("shape", [{}, {"beam_width": 2, "beam_length": 4, "tree_nodes": 6}])
def test_random_drafts(sampling: dict[str, Any], shape: dict[str, Any]) -> None:
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    options: dict[str, Any] = {"drafter": random_drafter(VOCAB_SIZE, 32), "max_tokens": 30}
    options |= sampling | shape
    prompts = _prompts(9)
    alone = [generate(model, tokenizer, prompt, **options) for prompt in prompts]
    for batch_size in (3, 8):
        found = generate_batch(model, tokenizer, prompts, batch_size=batch_size, **options)
        assert found == alone, batch_size


@pytest.mark.parametrize("drafter", ["none", "trained", "lookup"])
@pytest.mark.parametrize("sampling", [{}, {"temp": 1.0, "seed": 7}], ids=str)
def test_good_drafts(drafter: str, sampling: dict[str, Any]) -> None:
    model, tokenizer, trained = load()
    drafters: dict[str, Any] = {"none": None, "trained": trained, "lookup": "lookup"}
    engine = Engine(model, tokenizer, drafters[drafter])
    prompts = ["Once upon a time", "The old man opened the door and", "It was", "She said that he"]
    alone = [engine.generate(prompt, max_tokens=40, **sampling) for prompt in prompts]
    texts = [""] * len(prompts)
    steps = {}
    for number, response in engine.stream_batch(prompts, max_tokens=40, **sampling):
        texts[number] += response.text
        steps[number] = response.steps
    assert texts == alone
    if drafter == "trained":
        assert min(steps.values()) < 39, "some drafts were accepted"


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_drafts_that_are_only_looked_at(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    rng = random.Random(2)
    shadows = [Choice(replace(plan, num_nodes=1), 1) for plan in (SHORTEST, LONGEST)]
    choices = [Choice(), *shadows, Choice(WIDEST, 3)]
    monkeypatch.setattr(Explorer, "choose", lambda explorer, allows_drafts: rng.choice(choices))
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    prompts, options = _prompts(5), {"max_tokens": 30, **sampling}
    plain = [generate(model, tokenizer, prompt, drafter=None, **options) for prompt in prompts]
    engine = Engine(model, tokenizer, random_drafter(VOCAB_SIZE, 32))
    assert [engine.generate(prompt, **options) for prompt in prompts] == plain
    texts = [""] * len(prompts)
    for number, response in engine.stream_batch(prompts, batch_size=3, **options):
        texts[number] += response.text
    assert texts == plain


def test_a_stream_that_is_closed_and_one_that_is_cancelled() -> None:
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    engine = Engine(model, tokenizer, None)
    with closing(engine.stream_batch(_prompts(5), batch_size=2, max_tokens=50)) as stream:
        assert len(list(islice(stream, 20))) == 20
    assert list(stream) == []
    stream = engine.stream_batch(_prompts(5), batch_size=2, max_tokens=50)
    before = len(list(islice(stream, 20)))
    stream.cancel()
    assert before + len(list(stream)) < 5 * 50


def test_memory_does_not_grow_with_the_number_of_texts() -> None:
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)

    def peak(count: int) -> int:
        options: dict[str, Any] = {"drafter": None, "batch_size": 4, "max_tokens": 20}
        return peak_of(lambda: generate_batch(model, tokenizer, _prompts(count), **options))

    peak(8)
    assert peak(24) < 1.2 * peak(12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch_size": 0}, "batch_size must be an integer at least 1, got 0"),
        ({"batch_size": "4"}, "batch_size must be an integer at least 1, got '4'"),
        ({"max_tokens": "x"}, "max_tokens"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], reason: str) -> None:
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    with pytest.raises(ConfigError, match=reason):
        generate_batch(model, tokenizer, [[1, 2]], **options)


def test_quantised_texts_share_their_passes_and_others_have_their_own() -> None:
    model = tiny_llama(seed=5, vocab_size=VOCAB_SIZE, head_size=32)
    engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), random_drafter(VOCAB_SIZE, 32))
    quantised = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12}
    options: list[dict[str, Any]] = [
        quantised,
        quantised,
        {},
        {**quantised, "temp": 1.0, "seed": 3},
    ]
    pairs = list(zip(_prompts(len(options)), options, strict=True))
    expected = [engine.generate(prompt, max_tokens=25, **one) for prompt, one in pairs]
    shared = engine.share()
    streams = [engine.stream(prompt, max_tokens=25, shared=shared, **one) for prompt, one in pairs]
    texts = ["".join(parts) for parts in zip(*_in_turns(streams), strict=True)]
    assert texts == expected


def _in_turns(streams: list[Any]) -> Iterator[list[str]]:
    """One piece of each text after the other, "" after its end."""
    responses = [next(one, None) for one in streams]
    while any(responses):
        yield ["" if one is None else one.text for one in responses]
        responses = [next(one, None) for one in streams]


@pytest.mark.parametrize("drafter", ["none", "random", "lookup"])
@pytest.mark.parametrize("shape", [{}, {"beam_width": 2, "beam_length": 4, "tree_nodes": 6}])
def test_streams_that_share_their_passes(drafter: str, shape: dict[str, Any]) -> None:
    """They come and go in any order, with caches, processors and samplings of their own."""
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    drafters: dict[str, Any] = {"none": None, "lookup": "lookup"}
    drafters["random"] = random_drafter(VOCAB_SIZE, 32)
    engine = Engine(model, tokenizer, drafters[drafter])
    rng, shared = random.Random(3), engine.share()
    cases: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": rng.randrange(1, 40), **shape, **sampling}
        for prompt, sampling in zip(_prompts(9), SAMPLING * 3, strict=True)
    ]
    cases[1]["logits_processors"] = make_logits_processors(repetition_penalty=1.5)
    texts, caches, streams = [""] * len(cases), [], {}
    for _ in range(10_000):
        if len(caches) < len(cases) and rng.random() < 0.2:
            number = len(caches)
            caches.append(engine.new_prompt_cache())
            streams[number] = engine.stream(
                **cases[number], prompt_cache=caches[number], shared=shared
            )
        for number, stream in list(streams.items()):
            response = next(stream, None)
            if response is None:
                del streams[number]
            else:
                texts[number] += response.text
            if number == 4 and len(texts[number]) > 5:
                stream.close()
        if len(caches) == len(cases) and not streams:
            break
    for case, text, cache in zip(cases, texts, caches, strict=True):
        stock = engine.new_prompt_cache()
        expected = engine.generate(**case, prompt_cache=stock)
        if case is cases[4]:
            assert expected.startswith(text)
            continue
        assert text == expected
        for layer, stock_layer in zip(cache, stock, strict=True):
            assert layer.offset == stock_layer.offset
            pairs = zip(layer.keys_and_values(), stock_layer.keys_and_values(), strict=True)
            for rows, stock_rows in pairs:
                assert mx.allclose(rows, stock_rows, atol=1e-4)


def test_a_text_that_raises_among_others_ends_alone() -> None:
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    engine, calls = Engine(model, tokenizer, None), 0

    def fail(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise OSError("disk full")
        return logits

    shared, prompts = engine.share(), _prompts(3)
    expected = engine.generate(prompts[0], max_tokens=30)
    good = engine.stream(prompts[0], max_tokens=30, shared=shared)
    bad = engine.stream(prompts[1], max_tokens=30, shared=shared, logits_processors=[fail])
    texts: list[str] = []
    with pytest.raises(OSError, match="disk full"):
        texts.extend(response.text for _, response in zip(bad, good, strict=True))
    assert "".join([*texts, *(response.text for response in good)]) == expected


def test_a_progress_callback_that_raises_in_a_shared_prefill_ends_its_own_text() -> None:
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    engine = Engine(model, tokenizer, None)

    def fail(done: int, total: int) -> None:
        raise OSError("disk full")

    prompts, shared = [[5, 9] * 20, [7, 3] * 20, [8, 2] * 20], engine.share()
    expected = [engine.generate(prompt, max_tokens=9) for prompt in prompts]
    notes = [None, fail, None]
    streams = [
        engine.stream(
            prompt, max_tokens=9, shared=shared, prompt_progress_callback=note
        ).read_ready()
        for prompt, note in zip(prompts, notes, strict=True)
    ]
    assert [next(stream) for stream in streams] == [None] * 3
    shared.advance()
    with pytest.raises(OSError, match="disk full"):
        next(streams[1])
    texts = {0: "", 2: ""}
    for number in texts:
        for response in streams[number]:
            if response is None:
                shared.advance()
            else:
                texts[number] += response.text
    assert [texts[0], texts[2]] == [expected[0], expected[2]]


def test_prompts_share_passes_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    engine = Engine(model, tokenizer, None)
    rng, lengths = random.Random(3), (40, 9, 33, 1, 10, 30, 21)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    expected = [engine.generate(prompt, max_tokens=8) for prompt in prompts]
    shapes = _watch_passes(monkeypatch, model)
    stream = engine.stream_batch(prompts, batch_size=7, max_tokens=8, prefill_step_size=48)
    texts = [""] * len(prompts)
    for number, response in stream:
        texts[number] += response.text
    assert texts == expected
    # Chunks of 48 tokens of all texts together, and their ends together, in as many slots.
    assert shapes[:3] == [(6, 8), (3, 16), (8, 16)]


def test_slots_of_texts_that_have_ended_are_given_up_and_the_last_text_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    engine = Engine(model, tokenizer, None)
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(9)] for _ in range(8)]
    expected = [engine.generate(prompt, max_tokens=30) for prompt in prompts]
    shapes = _watch_passes(monkeypatch, model)
    shared = engine.share()
    ends = [30, 4, 5, 6, 12, 7, 8, 9]
    streams = [
        engine.stream(prompt, max_tokens=end, shared=shared)
        for prompt, end in zip(prompts, ends, strict=True)
    ]
    texts = [""] * len(prompts)
    live = dict(enumerate(streams))
    while live:
        for number, stream in list(live.items()):
            if (response := next(stream, None)) is None:
                del live[number]
            else:
                texts[number] += response.text
    assert texts[0] == expected[0]
    assert all(whole.startswith(text) for whole, text in zip(expected, texts, strict=True))
    sizes = [shape[0] for shape in shapes]
    passes = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]
    assert passes[-3:] == [8, 2, 1]


def test_a_text_that_is_never_alone_leaves_the_estimates_of_one_that_was() -> None:
    model, tokenizer, drafter = load()
    engine = Engine(model, tokenizer, drafter)
    list(engine.stream_batch(["Once upon a time"], max_tokens=20))
    estimates = engine.memory.policy
    assert estimates is not None
    assert not engine.memory.batches
    list(engine.stream_batch(["Once upon a time"] * 2, max_tokens=20))
    assert engine.memory.policy is estimates
    assert 2 in engine.memory.batches


def test_texts_cancelled_while_they_begin_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    engine, calls = Engine(model, tokenizer, None), 0
    stream = engine.stream_batch([[5] * 40, [6] * 40], max_tokens=8, prefill_step_size=8)
    process = type(model).__call__

    def counted(self: Any, tokens: mx.array, *rest: Any, **options: Any) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 3:
            stream.cancel()
        return process(self, tokens, *rest, **options)

    monkeypatch.setattr(type(model), "__call__", counted)
    assert list(stream) == []
    assert calls == 3


def test_a_prompt_does_not_stop_the_tokens_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_redrafter.decoding.scheduler.SHARED_CHUNK", 8)
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    engine, prompts = Engine(model, tokenizer, None), [[5], [9, 7, 5], [8, 3] * 30]
    ends = [4, 40, 40]
    expected = [
        engine.generate(prompt, max_tokens=end) for prompt, end in zip(prompts, ends, strict=True)
    ]
    shapes = _watch_passes(monkeypatch, model)
    shared = Scheduler(engine.target)
    requests = [Request(prompt, max_tokens=end) for prompt, end in zip(prompts, ends, strict=True)]
    sampler = KeyedSampler(SamplingParams(), engine.target.vocab_size)
    texts = [
        SequenceDecoder(engine.target, engine.target.caches.new(), sampler, request)
        for request in requests
    ]
    found: dict[SequenceDecoder, list[int]] = {text: [] for text in texts}
    shared.begin(texts[:2])
    while not all(text.is_closed for text in texts):
        for text, tokens, _ in shared.step_all():
            found[text] += [token.id for token in text.delivery.deliver(tokens)]
            if text.is_finished:
                shared.leave(text)
                text.close()
                if text is texts[0]:
                    shared.begin(texts[2:])
                    shapes.clear()
    decoded = [tokenizer.decode(found[text]) for text in texts]
    assert [text.rstrip() for text in decoded] == [text.rstrip() for text in expected]
    chunks = [i for i, shape in enumerate(shapes) if shape == (1, 8)]
    assert len(chunks) == 7, "59 tokens, the last three in a smaller chunk"
    assert all(later - earlier > 1 for earlier, later in pairwise(chunks)), "with steps in between"


def test_first_tokens_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
    engine, sizes = Engine(model, tokenizer, None), []
    verify = Target.verify_batch

    def counted(self: Target, forest: TreeBatch, *rest: Any) -> TargetOutputs:
        sizes.append(len(forest))
        return verify(self, forest, *rest)

    monkeypatch.setattr(Target, "verify_batch", counted)
    stream = engine.stream_batch(_prompts(4), batch_size=4, max_tokens=6)
    numbers = [number for number, _ in islice(stream, 4)]
    assert (numbers, sizes) == ([0, 1, 2, 3], [4])
    assert len(list(stream)) == 4 * 5
    assert sizes == [4] * 6
