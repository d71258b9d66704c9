"""Texts that share their forward passes are those that each has alone."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_redrafter import Engine, generate, generate_batch
from mlx_redrafter.decoding import scheduler
from mlx_redrafter.decoding.scheduler import Scheduler
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.engine import responses
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.policy.adaptive import Explorer
from mlx_redrafter.policy.plans import PLANS, SHORTEST, WIDEST, Choice
from tests.golden.record_fixed_shapes import load_once
from tests.helpers.calls import at_call
from tests.helpers.drafts import Scripted
from tests.helpers.equality import batch_texts, ids, stock_tokens
from tests.helpers.memory import peak_of
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer
from tests.models.trees import sequence_of, step_together

VOCAB_SIZE = 64
MODEL, TOKENIZER = tiny_llama(seed=5, vocab_size=VOCAB_SIZE), wrapped_tokenizer(VOCAB_SIZE)
TREE: dict[str, Any] = {"beam_width": 2, "beam_length": 4, "tree_nodes": 6}
# Of texts by the trained model.
BEGINNINGS = ["Once upon a time", "The old man opened the door and", "It was", "She said that he"]
SAMPLING = [{}, {"temp": 1.0, "seed": 7}, {"temp": 0.6, "top_p": 0.9, "seed": 1}]


def _prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def _watch_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the tokens of forward passes from now on."""
    shapes: list[tuple[int, ...]] = []
    note = lambda model, tokens, *_, **options: shapes.append(tokens.shape)  # noqa: E731
    at_call(monkeypatch, type(MODEL), "__call__", note)
    return shapes


@pytest.mark.parametrize(
    ("drafter", "shape"),
    [("trained", {}), ("trained", {"beam_width": 2, "beam_length": 5}), ("lookup", {})],
)
@pytest.mark.parametrize("sampling", [{}, {"temp": 1.0, "seed": 7}], ids=str)
def test_good_drafts(drafter, shape, sampling):
    """With fixed shapes, those of a batch are as good as those of each text alone."""
    model, tokenizer, trained = load_once()
    engine = Engine(model, tokenizer, trained if drafter == "trained" else drafter)
    options: dict[str, Any] = {"max_tokens": 30 if shape else 14, **shape, **sampling}
    alone = [list(engine.stream(prompt, **options)) for prompt in BEGINNINGS]
    together: list[list[Any]] = [[] for _ in BEGINNINGS]
    for number, response in engine.stream_batch(BEGINNINGS, **options):
        together[number].append(response)
    for found, expected in zip(together, alone, strict=True):
        assert [one.token for one in found] == [one.token for one in expected]
        assert "".join(one.text for one in found) == "".join(one.text for one in expected)
        for one, other in zip(found, expected, strict=True):
            assert mx.allclose(one.logprobs, other.logprobs, atol=1e-4, rtol=0)
        if shape:
            assert found[-1].steps == expected[-1].steps
    if drafter == "trained":
        assert min(found[-1].steps for found in together) < 13, "some drafts were accepted"


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_drafts_that_are_only_looked_at(monkeypatch, sampling):
    rng = random.Random(2)
    shadows = [Choice(replace(plan, num_nodes=1), 1) for plan in (SHORTEST, [*PLANS.values()][-1])]
    choices = [Choice(), *shadows, Choice(WIDEST, 3)]
    monkeypatch.setattr(Explorer, "choose", lambda explorer, allows_drafts: rng.choice(choices))
    prompts, options = _prompts(5), {"max_tokens": 14, **sampling}
    plain = [generate(MODEL, TOKENIZER, prompt, drafter=None, **options) for prompt in prompts]
    engine = Engine(MODEL, TOKENIZER, random_drafter(VOCAB_SIZE, 32))
    assert [engine.generate(prompt, **options) for prompt in prompts] == plain
    batch = engine.stream_batch(prompts, batch_size=3, **options)
    assert batch_texts(batch, len(prompts)) == plain


def test_a_stream_that_is_closed_and_one_that_is_cancelled():
    engine = Engine(MODEL, TOKENIZER, None)
    with closing(engine.stream_batch(_prompts(5), batch_size=2, max_tokens=50)) as stream:
        assert len(list(islice(stream, 20))) == 20
    assert list(stream) == []
    stream = engine.stream_batch(_prompts(5), batch_size=2, max_tokens=50)
    before = len(list(islice(stream, 20)))
    stream.cancel()
    assert before + len(list(stream)) < 5 * 50


def test_a_cancelled_stream_that_nobody_reads_leaves_the_batch():
    engine = Engine(MODEL, TOKENIZER, None)
    prompts, shared = _prompts(3), engine.share()
    expected = engine.generate(prompts[0], max_tokens=30)
    first, *others = [engine.stream(one, shared=shared, max_tokens=30) for one in prompts]
    text = "".join([next(first).text, *(next(one).text * 0 for one in others), next(first).text])
    for num_left, other in ((2, others[1]), (0, others[0])):  # the last one moves out
        other.cancel()
        text += next(first).text + next(first).text
        assert len(list(shared.batch)) == num_left
    assert text + "".join(one.text for one in first) == expected


def test_a_text_that_is_closed_beside_another_leaves_the_random_state_of_mlx_lm():
    (prompt, other), sampler = _prompts(2), make_sampler(0.7)
    mx.random.seed(3)
    text = ids(stock_tokens(MODEL, prompt, 20, sampler=sampler))
    engine = Engine(MODEL, TOKENIZER, Scripted(text, VOCAB_SIZE, 1.0))
    shape: dict[str, Any] = {"beam_width": 1, "beam_length": 3}
    for count in range(1, 12):
        shared = engine.share()
        beside = engine.stream(other, shared=shared, **shape)
        mx.random.seed(3)
        with engine.stream(prompt, shared=shared, sampler=sampler, **shape) as stream:
            assert [next(stream).token for one in text[:count] if next(beside)] == text[:count]
            next(beside)
        found = mx.random.uniform().item()
        mx.random.seed(3)
        stock_tokens(MODEL, prompt, count, sampler=sampler)
        assert mx.random.uniform().item() == found


def test_memory_does_not_grow_with_the_number_of_texts():
    def peak(count: int) -> int:
        options: dict[str, Any] = {"drafter": None, "batch_size": 4, "max_tokens": 8}
        return peak_of(lambda: generate_batch(MODEL, TOKENIZER, _prompts(count), **options))

    peak(8)
    assert peak(24) < 1.2 * peak(12)


def test_bad_options():
    reason = "batch_size must be an integer at least 1, got '4'"
    with pytest.raises(ConfigError, match=reason):
        generate_batch(MODEL, TOKENIZER, [[1, 2]], batch_size="4")  # type: ignore[arg-type]


def test_quantised_texts_share_their_passes_and_others_have_their_own():
    model = tiny_llama(seed=5, vocab_size=VOCAB_SIZE, head_size=32)
    engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), random_drafter(VOCAB_SIZE, 32))
    quantised = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12}
    options = [quantised, quantised, {}, {**quantised, "temp": 1.0, "seed": 3}]
    pairs = list(zip(_prompts(len(options)), options, strict=True))
    expected = [engine.generate(prompt, max_tokens=25, **one) for prompt, one in pairs]
    shared = engine.share()
    streams = [engine.stream(prompt, max_tokens=25, shared=shared, **one) for prompt, one in pairs]
    assert _read_in_turns(streams) == expected


def _read_in_turns(streams: list[Any]) -> list[str]:
    """Texts of streams, of which one token each is read in turn."""
    texts, live = [""] * len(streams), dict(enumerate(streams))
    while live:
        for number, stream in list(live.items()):
            if (response := next(stream, None)) is None:
                del live[number]
            else:
                texts[number] += response.text
    return texts


def _responses(ready: Iterator[Any], shared: Any) -> Iterator[Any]:
    """Responses of a text; passes are made while there is none."""
    for response in ready:
        if response is None:
            shared.advance()
        else:
            yield response


def test_a_progress_callback_that_raises_in_a_shared_prefill_ends_its_own_text():
    engine = Engine(MODEL, TOKENIZER, None)
    prompts, shared = [[5, 9] * 20, [7, 3] * 20, [8, 2] * 20], engine.share()
    expected = [engine.generate(prompt, max_tokens=9) for prompt in prompts]
    notes = [None, Mock(side_effect=OSError("disk full")), None]
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
    for number in (0, 2):
        text = "".join(one.text for one in _responses(streams[number], shared))
        assert text == expected[number]


def test_a_text_that_is_read_amid_a_pass_of_others_is_refused():
    engine = Engine(MODEL, TOKENIZER, None)
    shared = engine.share()
    other = engine.stream([5], shared=shared)
    first = engine.stream(
        [7], shared=shared, prompt_progress_callback=lambda done, total: next(other)
    )
    with pytest.raises(ConfigError, match="found two at once; read them in one thread"):
        next(first)


def test_the_speed_of_a_prompt_counts_its_chunks(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(responses.time, "perf_counter", lambda: next(clock))
    engine = Engine(MODEL, TOKENIZER, None)
    shared = engine.share()
    stream = engine.stream([5, 9] * 20, shared=shared, max_tokens=4, prefill_step_size=8)
    found = list(_responses(stream.read_ready(), shared))
    assert 0 < found[0].prompt_tps <= 40 / 5, "five chunks, each of which reads the clock"


@pytest.mark.parametrize("options", [{}, {"temp": 1.0, "seed": 4}, TREE], ids=str)
def test_processors_that_promote_a_dtype(options):
    """Rounded to that of the other logits, the processed ones would have more ties."""
    model = tiny_llama(seed=1, vocab_size=VOCAB_SIZE, layers=2, spread=1.0)
    model.set_dtype(mx.bfloat16)
    penalise = make_logits_processors(repetition_penalty=1.1)[0]

    def shrink(tokens: mx.array, logits: mx.array) -> mx.array:
        return penalise(tokens, logits.astype(mx.float32))

    engine = Engine(model, TOKENIZER, random_drafter(VOCAB_SIZE, 32) if options is TREE else None)
    asked = {"max_tokens": 40, "logits_processors": [shrink], **options}
    alone = [[one.token for one in engine.stream(prompt, **asked)] for prompt in _prompts(6)]
    shared = engine.share()
    streams = [engine.stream(prompt, shared=shared, **asked) for prompt in _prompts(6)]
    found = zip(*([one.token for one in turn] for turn in zip(*streams, strict=True)), strict=True)
    assert list(map(list, found)) == alone


def test_prompts_share_passes_until_they_end(monkeypatch):
    engine = Engine(MODEL, TOKENIZER, None)
    prompts = [list(range(length)) for length in (40, 9, 33, 1, 10, 30, 21)]
    expected = [engine.generate(prompt, max_tokens=8) for prompt in prompts]
    shapes = _watch_passes(monkeypatch)
    stream = engine.stream_batch(prompts, batch_size=7, max_tokens=8, prefill_step_size=48)
    assert batch_texts(stream, len(prompts)) == expected
    # Chunks of 48 tokens of all texts together, and their ends together, in as many slots.
    assert shapes[:3] == [(6, 8), (3, 16), (8, 16)]


@pytest.mark.parametrize(("shape", "last"), [({}, [8, 2, 1]), (TREE, [8, 4, 2, 1])])
def test_slots_of_texts_that_have_ended_are_given_up_and_the_last_text_has_none(
    monkeypatch, shape, last
):
    """Sooner if each costs the nodes of a tree."""
    engine = Engine(MODEL, TOKENIZER, random_drafter(VOCAB_SIZE, 32) if shape else None)
    prompts = [list(range(number, number + 9)) for number in range(8)]
    expected = [engine.generate(prompt, max_tokens=30) for prompt in prompts]
    shapes = _watch_passes(monkeypatch)
    shared = engine.share()
    ends = [30, 4, 5, 6, 12, 7, 8, 9]
    streams = [
        engine.stream(prompt, max_tokens=end, shared=shared, **shape)
        for prompt, end in zip(prompts, ends, strict=True)
    ]
    texts = _read_in_turns(streams)
    assert texts[0] == expected[0]
    assert all(whole.startswith(text) for whole, text in zip(expected, texts, strict=True))
    sizes = [size for size, *_ in shapes]
    passes = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]
    assert passes[-len(last) :] == last


def test_a_text_that_is_never_alone_leaves_the_estimates_of_one_that_was():
    engine = Engine(*load_once())
    list(engine.stream_batch(["Once upon a time"], max_tokens=20))
    estimates = engine.memory.policy
    assert estimates is not None
    assert not engine.memory.batches
    list(engine.stream_batch(["Once upon a time"] * 2, max_tokens=20))
    assert engine.memory.policy is estimates
    assert 2 in engine.memory.batches


def test_texts_cancelled_while_they_begin_end(monkeypatch):
    engine, shapes = Engine(MODEL, TOKENIZER, None), _watch_passes(monkeypatch)
    stream = engine.stream_batch([[5] * 40, [6] * 40], max_tokens=8, prefill_step_size=8)
    at_call(monkeypatch, type(MODEL), "__call__", lambda *_, **options: stream.cancel(), 3)
    assert (list(stream), len(shapes)) == ([], 3)


def test_a_prompt_does_not_stop_the_tokens_of_others(monkeypatch):
    monkeypatch.setattr(scheduler, "SHARED_CHUNK", 8)
    engine, prompts = Engine(MODEL, TOKENIZER, None), [[5], [9, 7, 5], [8, 3] * 30]
    ends = [4, 40, 40]
    expected = [
        engine.generate(prompt, max_tokens=end) for prompt, end in zip(prompts, ends, strict=True)
    ]
    shapes = _watch_passes(monkeypatch)
    # A clock of passes, as on a busy machine a step may take longer than a chunk, or no pass.
    monkeypatch.setattr(scheduler, "time", Mock(perf_counter=lambda: len(shapes)))
    shared = Scheduler(engine.target)
    texts = [
        sequence_of(engine.target, prompt, max_tokens=end)
        for prompt, end in zip(prompts, ends, strict=True)
    ]
    found: dict[SequenceDecoder, list[int]] = {text: [] for text in texts}
    waiting = texts[2:]
    shared.begin(texts[:2])
    while not all(text.is_closed for text in texts):
        for text, tokens in step_together(shared):
            found[text] += tokens
        if texts[0].is_closed and waiting:
            shared.begin([waiting.pop()])
            begin = len(shapes)
    decoded = [TOKENIZER.decode(found[text]) for text in texts]
    assert [text.rstrip() for text in decoded] == [text.rstrip() for text in expected]
    chunks = [i for i, shape in enumerate(shapes[begin:]) if shape == (1, 8)]
    assert len(chunks) == 7, "59 tokens, the last three in a smaller chunk"
    assert all(later - earlier > 1 for earlier, later in pairwise(chunks)), "with steps in between"
