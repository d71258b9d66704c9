"""An engine: threads, cancelling, what it remembers, conversations, and the end of memory."""

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.models.cache import ChunkedKVCache, make_prompt_cache

from mlx_redrafter import Engine, Lookup, generate, memory_sizes, stream_generate
from mlx_redrafter.engine import memory_guard
from mlx_redrafter.engine.conversation import Conversation
from mlx_redrafter.engine.generation import LearnedStates
from mlx_redrafter.engine.prompt_encoding import encode_chat
from mlx_redrafter.errors import ConfigError, ResourceError
from mlx_redrafter.proposers.draft_model import DraftModel
from mlx_redrafter.proposers.lookup import Contexts
from mlx_redrafter.proposers.lookup.lookup import LookupDrafting
from tests.helpers.calls import at_call
from tests.helpers.cli import python
from tests.helpers.drafts import Scripted
from tests.helpers.equality import ids, stock_tokens, tokens
from tests.helpers.few_shapes import compile_passes
from tests.helpers.models import ROOT, chat_tokenizer, random_drafter, tiny_llama, wrapped_tokenizer
from tests.models.tiny_models import build, tiny_config, windowed_config

VOCAB_SIZE = 64
PROMPT = [5, 17, 3, 60]
DRAFTERS: dict[str, Callable[[nn.Module], Any]] = {
    "network": lambda model: random_drafter(VOCAB_SIZE, 32),
    "lookup": lambda model: "lookup",
    "draft model": lambda model: DraftModel(model, wrapped_tokenizer(VOCAB_SIZE)),
    "none": lambda model: None,
}


@pytest.fixture(params=DRAFTERS)
def engine(model: nn.Module, request: pytest.FixtureRequest) -> Engine:
    return Engine(model, wrapped_tokenizer(VOCAB_SIZE), DRAFTERS[request.param](model))


def test_a_stream_belongs_to_one_thread(engine):
    stream = engine.stream(PROMPT, max_tokens=3)
    next(stream)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="read it in one thread"):
        pool.submit(next, stream).result()
    assert len(list(stream)) == 2


def test_another_thread_cancels_a_text(engine):
    stream = engine.stream(PROMPT, max_tokens=-1)
    found = [next(stream) for _ in range(3)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(stream.cancel).result()
    rest = list(stream)
    assert len(rest) < 16, "at most the rest of a step"
    assert all(response.finish_reason is None for response in found + rest)
    assert list(engine.stream(PROMPT, max_tokens=3)), "the engine goes on"


def test_a_text_is_cancelled_while_its_prompt_is_processed(engine):
    done: list[int] = []

    def on_progress(processed: int, total: int) -> None:
        done.append(processed)
        if processed >= 8:
            stream.cancel()

    options: Any = {"prefill_step_size": 4, "prompt_progress_callback": on_progress}
    stream = engine.stream(PROMPT * 20, max_tokens=9, **options)
    assert list(stream) == []
    assert done[-1] == 8


@pytest.mark.parametrize("size", [0, -1, "4"])
def test_a_chunk_of_no_size_is_named(engine, size):
    stream = engine.stream(PROMPT, max_tokens=3, prompt_chunk_size=lambda done: size)
    message = f"prompt_chunk_size must be an integer at least 1, got {size!r}"
    with pytest.raises(ConfigError, match=message):
        list(stream)


def test_a_closed_engine_ends_its_texts_and_begins_none(engine):
    with engine.stream(PROMPT, max_tokens=-1) as stream:
        next(stream)
    assert list(stream) == []
    stream = engine.stream(PROMPT, max_tokens=-1)
    next(stream)
    engine.close()
    assert len(list(stream)) < 16
    with pytest.raises(ConfigError, match="the engine is closed"):
        engine.stream(PROMPT)


@pytest.mark.parametrize("is_batch", [False, True])
def test_an_engine_that_is_closed_while_a_text_is_opened_ends_it(model, monkeypatch, is_batch):
    """To open a text may have steps timed, for seconds; then nobody would end it."""
    engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), "lookup")
    name = "_share" if is_batch else "_open"
    at_call(monkeypatch, engine, name, lambda *_: engine.close())
    text: Any = engine.stream_batch([PROMPT]) if is_batch else engine.stream(PROMPT)
    assert list(text) == []


@pytest.mark.parametrize("shape", [{}, {"beam_width": 2}])
def test_another_thread_reads_the_log_probabilities(engine, shape):
    """Also once the thread that made them has ended, as with mlx-lm."""
    options: dict[str, Any] = {"max_tokens": 9, **shape}

    def make() -> list[Any]:
        batch = engine.stream_batch([PROMPT, PROMPT[1:]], **options)
        return [*engine.stream(PROMPT, **options), *(one.response for one in batch)]

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(make).result()
    assert len(found) == 27
    assert all(mx.argmax(one.logprobs).item() == one.token for one in found)
    assert {one.logprobs.shape for one in found} == {(VOCAB_SIZE,)}


def test_memories_last_as_long_as_their_owners(model):
    memories, other = LearnedStates(), tiny_llama(seed=5)
    drafter = random_drafter(VOCAB_SIZE, 32)
    memory = memories.of(other, drafter)
    assert memories.of(other, drafter) is memory
    assert memories.of(other) is not memory
    assert memories.of(model, drafter) is not memory
    generate(other, wrapped_tokenizer(VOCAB_SIZE), PROMPT, drafter="lookup", max_tokens=5)
    gone = weakref.ref(other)
    mx.synchronize()
    del other
    gc.collect()
    assert gone() is None, "neither a memory nor a function keeps a model"
    assert len(memories._known) == 1


def test_lookup_is_the_default(model):
    engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE))
    assert isinstance(engine.proposer, Lookup)
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 6
    responses = list(engine.stream(text, max_tokens=30))
    assert [r.token for r in responses] == tokens(model, text, max_tokens=30)


def test_an_engine_writes_with_the_weights_that_the_model_has_now(monkeypatch):
    compile_passes(monkeypatch, uses=2)
    model, other = tiny_llama(seed=5), tiny_llama(seed=6)
    first, second = (ids(stock_tokens(one, PROMPT, 20)) for one in (model, other))
    engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), Scripted(first, VOCAB_SIZE, 0.9))
    options = {"max_tokens": 20, "beam_width": 1, "beam_length": 4}
    assert [r.token for r in engine.stream(PROMPT, **options)] == first
    model.update(other.parameters())
    assert [r.token for r in engine.stream(PROMPT, **options)] == second


SCRIPT = """
import threading
from mlx_redrafter import Engine, generate, load
import mlx.core as mx
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer

model, tokenizer, drafter = tiny_llama(seed=4), wrapped_tokenizer(64), random_drafter(64, 32)
options = {"beam_width": 2, "max_tokens": 12}

def write():
    generate(model, tokenizer, [5, 17, 3], drafter=drafter, **options)

def write_batch():
    list(Engine(model, tokenizer, drafter).stream_batch([[5, 17], [3]], **options))

for work in (write, write_batch, load):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

engine = Engine(model, tokenizer)
begun = [engine.stream([5], sampler=mx.random.categorical), engine.stream_batch([[5, 17], [3]])]
for stream in begun:
    next(stream)
print("written")
"""


def test_neither_threads_that_have_ended_nor_open_streams_disturb_the_end_of_the_process():
    done = python("-c", SCRIPT, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "written\n", "")


ASKED = ["HOW ARE YOU", "AND YOU", "HOW ARE YOU"]


def _prompt(conversation: Conversation, text: str, kept: int | None = None) -> list[int]:
    """Encode a conversation with one more message of the user."""
    asked = [*conversation.messages, {"role": "user", "content": text}]
    return encode_chat(chat_tokenizer(kept), asked)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("sampling", "kept"), [({}, 5), ({"temp": 0.9, "seed": 3}, None)])
def test_answers_are_those_of_plain_decoding(model, drafter, sampling, kept):
    _assert_plain_answers(model, DRAFTERS[drafter](model), kept, sampling)


@pytest.mark.parametrize("kept", [None, 5])
@pytest.mark.parametrize("model_type", ["qwen3_5", "mamba2"])
def test_answers_of_models_with_states(model_type, kept):
    """A state cannot be cut where a template shortens, and the tokens in it may be unknown."""
    config = tiny_config(model_type)
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}
    inner = {**config.get("text_config", {}), **sizes}
    model = build({**config, **sizes, "text_config": inner})
    _assert_plain_answers(model, "lookup", kept, {"temp": 0.9, "seed": 3})


@pytest.mark.parametrize("kept", [4, 8, 16])
def test_answers_of_a_model_with_chunks(monkeypatch, kept):
    """A template shortens the first answer, whose oldest entries these layers have dropped."""
    monkeypatch.setattr(ChunkedKVCache, "step", 16)  # so that a short text drops some
    config = windowed_config("llama4", window=16)
    inner = {**config["text_config"], "vocab_size": VOCAB_SIZE}
    model = build({**config, "text_config": inner}, 1)
    _assert_plain_answers(model, None, kept, {"max_tokens": 40})


def _assert_plain_answers(
    model: nn.Module, drafter: Any, kept: int | None, sampling: dict[str, Any]
) -> None:
    conversation = Conversation(Engine(model, chat_tokenizer(kept), drafter), "BE GOOD")
    options = {"max_tokens": 14, **sampling}
    for text in ASKED:
        plain = tokens(model, _prompt(conversation, text, kept), **options)
        before = conversation.messages[:]
        found = list(conversation.ask(text, **options))
        assert [one.token for one in found] == plain
        answer = {"role": "assistant", "content": "".join(one.text for one in found)}
        asked = {"role": "user", "content": text}
        assert conversation.messages == [*before, asked, answer]


def test_only_what_is_new_is_read(model):
    conversation = Conversation(Engine(model, chat_tokenizer(), "lookup"))
    read: list[int] = []
    options: dict[str, Any] = {"prompt_progress_callback": lambda done, total: read.append(total)}
    for text in ASKED:
        list(conversation.ask(text, max_tokens=8, **options))
    # "[U]", the text and "[A]".
    assert sorted(set(read)) == sorted({len(text) + 6 for text in ASKED})


@pytest.mark.parametrize("drafter", ["lookup", "network"])
def test_a_turn_drafts_from_the_turns_before_it(model, monkeypatch, drafter):
    engine = Engine(model, chat_tokenizer(), DRAFTERS[drafter](model))
    begun: list[Contexts] = []
    at_call(monkeypatch, LookupDrafting, "__init__", lambda *args: begun.append(args[1]))
    one, other = Conversation(engine), Conversation(engine)
    for text in ASKED:
        list(one.ask(text, max_tokens=8))
    list(other.ask(ASKED[0], max_tokens=8))
    assert begun[:3] == [begun[0]] * 3
    assert begun[3] is not begun[0]
    # Nothing is read twice, but drafts may be accepted beyond the end of an answer.
    assert len(one._tokens) <= len(begun[0].tokens) < len(one._tokens) + 40
    assert bool(begun[0].candidates(begun[0].end.key)[0]) == (drafter == "lookup")


def test_contexts_that_another_thread_adds_to_leave_a_text_as_it_is(model, monkeypatch):
    at_call(monkeypatch, LookupDrafting, "_grow", lambda drafting, *_: drafting.contexts.add(7))
    options = {"beam_width": 2, "beam_length": 4, "tree_nodes": 8, "history": Contexts()}
    text = tokens(model, PROMPT, "lookup", max_tokens=40, **options)
    assert text == tokens(model, PROMPT, max_tokens=40)


def test_an_answer_that_is_left_goes_on_as_far_as_it_was_read(model):
    conversation = Conversation(Engine(model, chat_tokenizer(), "lookup"))
    answer = conversation.ask(ASKED[0], max_tokens=50)
    text = "".join(next(answer).text for _ in range(5))
    answer.close()  # type: ignore[attr-defined]
    assert conversation.messages[-1]["content"] == text
    plain = tokens(model, _prompt(conversation, ASKED[1]), max_tokens=20)
    assert [one.token for one in conversation.ask(ASKED[1], max_tokens=20)] == plain


@pytest.mark.parametrize("num_kept", [0, 2])
def test_a_chat_whose_messages_were_taken_away_reads_what_is_left(model, num_kept):
    conversation = Conversation(Engine(model, chat_tokenizer(), "lookup"))
    while conversation.num_left_out < 3:
        list(conversation.ask("TELL ME MORE OF THIS, PLEASE", max_tokens=40))
    del conversation.messages[num_kept:]
    plain = tokens(model, _prompt(conversation, "AND YOU"), max_tokens=9)
    assert [one.token for one in conversation.ask("AND YOU", max_tokens=9)] == plain
    assert conversation.num_left_out == 0


def test_a_second_answer_leaves_the_first_one_alone(model):
    conversation = Conversation(Engine(model, chat_tokenizer(), None))
    list(conversation.ask("HELLO", max_tokens=8))
    plain = tokens(model, _prompt(conversation, "AND YOU"), max_tokens=20)
    first = conversation.ask("AND YOU", max_tokens=20)
    found = [next(first).token for _ in range(3)]
    conversation.messages = [{"role": "user", "content": "OTHER"}]  # which the cache does not hold
    with pytest.raises(ConfigError, match="another answer of this conversation has not ended"):
        next(conversation.ask("ANEW", max_tokens=8))
    found += [one.token for one in first]
    assert found == plain
    assert len(list(conversation.ask("ANEW", max_tokens=8))) == 8


def test_what_is_refused_changes_nothing(model):
    conversation = Conversation(Engine(model, chat_tokenizer(), "lookup"))
    list(conversation.ask(ASKED[0], max_tokens=8))
    before = list(conversation.messages)
    with pytest.raises(ConfigError, match="max_tokens"):
        list(conversation.ask(ASKED[1], max_tokens=-5))
    assert conversation.messages == before
    assert len(list(conversation.ask(ASKED[1], max_tokens=8))) == 8
    with pytest.raises(ConfigError, match="chat template"):
        Conversation(Engine(model, wrapped_tokenizer(VOCAB_SIZE), None))


TALE = "Tim had a red ball. Tim had a"
END = 2 * memory_guard.EVERY


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fake readings, whether memory is short; after the last one it is short no longer."""
    left: list[bool] = []
    monkeypatch.setattr(memory_guard, "is_memory_short", lambda: bool(left) and left.pop(0))
    return left


def test_a_text_ends_at_the_second_short_reading(stories, readings, caplog):
    cache = make_prompt_cache(stories.model)
    text = []
    with caplog.at_level(logging.WARNING):
        for last in stream_generate(
            stories.model, stories.tokenizer, TALE, max_tokens=100, prompt_cache=cache
        ):
            text.append(last)
            if len(text) == 1:  # the prompt's own readings are done
                readings += [True, True]
    stock = mlx_lm.generate(stories.model, stories.tokenizer, TALE, max_tokens=END)
    assert "".join(one.text for one in text) == stock
    assert (last.generation_tokens, last.finish_reason) == (END, "length")
    (line,) = (one.getMessage() for one in caplog.records if "memory" in one.getMessage())
    assert f"the text ends after {END} tokens" in line
    # The caller's cache holds the prompt and the text, as after any other end.
    num_prompt = len(stories.tokenizer.encode(TALE))
    assert cache[0].offset == num_prompt + END
    # The engine goes on.
    assert len(generate(stories.model, stories.tokenizer, TALE, max_tokens=END)) == len(stock)


def test_one_short_reading_ends_nothing(stories, readings):
    readings += [True, False] * 6
    stock = mlx_lm.generate(stories.model, stories.tokenizer, TALE, max_tokens=70)
    assert generate(stories.model, stories.tokenizer, TALE, max_tokens=70) == stock
    # Two in a row while a prompt is read are an error of one line.
    readings[:] = [True, True]
    with pytest.raises(ResourceError, match=r"used up after \d+ of \d+ prompt") as caught:
        generate(stories.model, stories.tokenizer, TALE * 4, max_tokens=4, prefill_step_size=8)
    assert "\n" not in str(caught.value)


def test_all_texts_of_a_batch_end(stories, readings):
    engine = Engine(stories.model, stories.tokenizer)
    found: list[list[Any]] = [[], []]
    for number, response in engine.stream_batch([TALE, TALE], max_tokens=100, seed=0):
        found[number].append(response)
        readings[:] = [True] * 100
    assert [(len(one), one[-1].finish_reason) for one in found] == [(END, "length")] * 2


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS reports a level of pressure")
def test_the_reading_of_linux(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_sizes, "MEMINFO", tmp_path / "meminfo")
    for available, is_short in (("900", True), ("90000", False), (None, False)):
        last = "" if available is None else f"MemAvailable:  {available} kB\n"
        memory_sizes.MEMINFO.write_text(f"MemTotal:      100000 kB\nMemFree:  10 kB\n{last}")
        assert memory_sizes.is_memory_short() == is_short


def test_the_reading_of_macos(monkeypatch):
    """Without macOS's function the pressure is 0, which is not short."""
    if sys.platform != "darwin":
        assert memory_sizes._read_pressure() == 0
    monkeypatch.setattr(memory_sizes.sys, "platform", "darwin")
    for level, is_short in ((1, False), (2, False), (4, True)):
        monkeypatch.setattr(memory_sizes, "_read_pressure", lambda level=level: level)
        assert memory_sizes.is_memory_short() == is_short


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The wired limits so far, counted from none: a failed test may have left a text open."""
    found = [0]

    @contextmanager
    def limit(*_: object) -> Iterator[None]:
        before = found[-1]
        found.append(100)
        yield
        found.append(before)

    monkeypatch.setattr(memory_guard, "wired_limit", limit)
    monkeypatch.setattr(memory_guard, "_wiring", memory_guard._Wiring())
    return found


def test_the_wired_limit_is_a_switch(stories, monkeypatch, limits):
    for value in ("1", "0"):
        monkeypatch.setenv(memory_guard.SWITCH, value)
        generate(stories.model, stories.tokenizer, TALE, max_tokens=2)
        assert limits == [0, 100, 0], "once"


def test_texts_that_end_in_any_order_share_the_wired_limit(model, limits):
    engine = Engine(model, wrapped_tokenizer(VOCAB_SIZE), None)
    first, second = (engine.stream(PROMPT, max_tokens=4) for _ in range(2))
    next(first), next(second)
    list(first)
    assert limits[-1] == 100, "the second one goes on"
    list(second)
    assert limits[-1] == 0
