"""A text that is cancelled or fails at any point ends alone; its cache holds what it yielded."""

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest

from mlx_redrafter import Engine, device_read
from mlx_redrafter.decoding.batch import Batch
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.engine.responses import ResponseStream
from mlx_redrafter.errors import ConfigError, NonFiniteError
from mlx_redrafter.target.caches.batch_layers import BatchLayer
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.target import Target
from tests.helpers.calls import at_call
from tests.helpers.drafts import Scripted
from tests.helpers.equality import batch_tokens, ids, stock_tokens
from tests.helpers.few_shapes import compile_passes
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer
from tests.unit.target.test_tree_cache import assert_same_rows, prefilled

VOCAB_SIZE, NUM_TOKENS = 64, 9
PROMPTS = [[5, 17, 3, 60, 9, 11], [8, 2, 8, 2, 8], [33, 1, 7]]
MODEL = tiny_llama(seed=5, vocab_size=VOCAB_SIZE)
EXPECTED = [ids(stock_tokens(MODEL, prompt, NUM_TOKENS)) for prompt in PROMPTS]
# Drafters by name, and the shapes of their drafts.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (None, {}),
    "lookup": ("lookup", {}),
    "chains": (random_drafter(VOCAB_SIZE, 32), {"beam_width": 1, "beam_length": 4}),
    "trees": (random_drafter(VOCAB_SIZE, 32), {"beam_width": 2, "beam_length": 3}),
    "adaptive": (random_drafter(VOCAB_SIZE, 32), {}),
    "right": (Scripted(EXPECTED[0], VOCAB_SIZE, 0.9), {"beam_width": 2, "beam_length": 5}),
}


def _engine(drafter: Any) -> Engine:
    return Engine(MODEL, wrapped_tokenizer(VOCAB_SIZE), drafter)


def at_event(patch: pytest.MonkeyPatch, number: int, do: Callable[[], object]) -> None:
    """Do something when the host builds a pass or reads an array for the n-th time."""
    count = 0

    def happen(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            do()

    for name in ("advance", "verify", "verify_batch", "process_chunk", "compute"):
        at_call(patch, Target, name, happen)
    at_call(patch, device_read, "waiting", happen)


def in_another_thread(do: Callable[[], object]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def read_at_random(
    streams: Sequence[ResponseStream], seed: int
) -> tuple[list[list[int]], list[Any]]:
    """Tokens and errors of streams that one thread reads in any order; some rest for long."""
    rng = random.Random(seed)
    found: list[list[int]] = [[] for _ in streams]
    errors: list[Any] = [None for _ in streams]
    live = list(range(len(streams)))
    while live:
        number = rng.choice(live)
        for _ in range(rng.randrange(1, 5)):
            try:
                found[number].append(next(streams[number]).token)
            except (Exception, KeyboardInterrupt) as error:
                errors[number] = None if isinstance(error, StopIteration) else error
                live.remove(number)
                break
    return found, errors


def assert_begins(cache: list[Any], text: list[int]) -> None:
    """The cache has no more than a beginning of a text."""
    length = cache[0].offset
    assert length <= len(text)
    if length:
        assert_same_rows(cache, prefilled(MODEL, text[:length]))


def assert_holds(cache: list[Any], prompt: list[int], tokens: list[int]) -> None:
    """The cache has the prompt and the tokens, or a beginning of the prompt before any token."""
    assert not tokens or cache[0].offset == len(prompt) + len(tokens)
    assert_begins(cache, prompt + tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared"])
def test_cancelled_by_another_thread_at_any_point(monkeypatch, kind, is_shared):
    drafter, shape = KINDS[kind]
    options = {**shape, "max_tokens": NUM_TOKENS, "prefill_step_size": 3}
    num_cut = 0
    for number in range(2 + list(KINDS).index(kind) % 4, 34, 5):
        engine = _engine(drafter)
        caches = [engine.new_prompt_cache() for _ in PROMPTS]
        options["shared"] = engine.share() if is_shared else None
        streams = [
            engine.stream(one, prompt_cache=cache, **options)
            for one, cache in zip(PROMPTS, caches, strict=True)
        ]
        with monkeypatch.context() as patch:
            at_event(patch, number, lambda: in_another_thread(streams[1].cancel))  # noqa: B023
            found, errors = read_at_random(streams, number)
        assert errors == [None] * 3
        assert (found[0], found[2]) == (EXPECTED[0], EXPECTED[2])
        assert found[1] == EXPECTED[1][: len(found[1])]
        num_cut += found[1] != EXPECTED[1]
        for one in zip(caches, PROMPTS, found, strict=True):
            assert_holds(*one)
    assert num_cut > 1


@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_between_the_choice_of_a_pass_and_the_pass(monkeypatch, kind):
    """The pass of the others overwrites the entries of its tree in flight."""
    drafter, shape = KINDS[kind]
    num_shared = 0
    for number, seed in itertools.product((3, 5, 7, 9), range(6, 10)):
        engine = _engine(drafter)
        shared, cache = engine.share(), engine.new_prompt_cache()
        options = {**shape, "max_tokens": NUM_TOKENS, "shared": shared}
        stream = engine.stream(PROMPTS[0], prompt_cache=cache, **options)
        other = engine.stream(PROMPTS[1], **options)

        def cancel(_: Batch, moving: Sequence[Any]) -> None:
            nonlocal num_shared
            num_shared += len(moving) > 1
            stream.cancel()  # noqa: B023

        with monkeypatch.context() as patch:
            at_call(patch, Batch, "step", cancel, number)
            found, errors = read_at_random([stream, other], seed)
        assert errors == [None] * 2
        assert found == [EXPECTED[0][: len(found[0])], EXPECTED[1]]
        assert_holds(cache, PROMPTS[0], found[0])
    assert num_shared > 1


@pytest.mark.parametrize("kind", KINDS)
def test_turns_on_one_cache_go_on_where_a_reader_left(kind):
    """Alone and with others, closed or cancelled after any number of tokens."""
    drafter, shape = KINDS[kind]
    plain, turn = _engine(None), [12, 40]
    for count in range(1, NUM_TOKENS + 1):
        engine = _engine(drafter)
        cache, shared = engine.new_prompt_cache(), engine.share() if count % 2 else None
        others = [engine.stream(one, shared=shared, max_tokens=30, **shape) for one in PROMPTS[1:]]
        first = engine.stream(
            PROMPTS[0], prompt_cache=cache, max_tokens=NUM_TOKENS, shared=shared, **shape
        )
        found = [next(first).token]
        while len(found) < count:
            for other in others:
                next(other)
            found.append(next(first).token)
        if count % 3:
            first.close()
        else:
            in_another_thread(first.cancel)
            found += [r.token for r in first]
        assert found == EXPECTED[0][: len(found)]
        assert_holds(cache, PROMPTS[0], found)
        again = engine.stream(turn, prompt_cache=cache, shared=shared, max_tokens=5, **shape)
        whole = plain.stream([*PROMPTS[0], *found, *turn], max_tokens=5)
        assert [r.token for r in again] == [r.token for r in whole]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_the_middle_of_a_pass_ends_its_text_and_no_other(monkeypatch, kind):
    drafter, shape = KINDS[kind]
    engine, num_failed = _engine(drafter), 0
    for number in range(1, 30, 3):
        cache, found = engine.new_prompt_cache(), list[int]()
        stream = engine.stream(PROMPTS[0], prompt_cache=cache, max_tokens=NUM_TOKENS, **shape)
        with monkeypatch.context() as patch, suppress(OSError):
            at_event(patch, number, Mock(side_effect=OSError("unplugged")))
            found.extend(response.token for response in stream)
        num_failed += len(found) < NUM_TOKENS
        assert found == EXPECTED[0][: len(found)]
        assert_begins(cache, PROMPTS[0] + found)
        again = engine.stream(PROMPTS[1], max_tokens=NUM_TOKENS, **shape)
        assert [r.token for r in again] == EXPECTED[1]
    assert num_failed > 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("owner", "name"), [(BatchLayer, "update_and_fetch"), (SequenceDecoder, "push")]
)
def test_ctrl_c_in_the_middle_of_a_shared_pass_spoils_no_text(monkeypatch, kind, owner, name):
    """Texts either go on as they are, or end with an error and a cache of what they yielded."""
    drafter, shape = KINDS[kind]
    num_stopped = 0
    for number in range(2, 32, 3):
        engine = _engine(drafter)
        shared, caches = engine.share(), [engine.new_prompt_cache() for _ in PROMPTS]
        streams = [
            engine.stream(one, prompt_cache=cache, shared=shared, max_tokens=NUM_TOKENS, **shape)
            for one, cache in zip(PROMPTS, caches, strict=True)
        ]
        with monkeypatch.context() as patch:
            at_call(patch, owner, name, Mock(side_effect=KeyboardInterrupt), number)
            found, errors = read_at_random(streams, number)
        num_stopped += any(errors)
        for one, tokens, error in zip(EXPECTED, found, errors, strict=True):
            assert tokens == (one if error is None else one[: len(tokens)])
        for cache, prompt, tokens in zip(caches, PROMPTS, found, strict=True):
            assert_begins(cache, prompt + tokens)
    assert num_stopped > 3


@pytest.mark.parametrize(
    ("kind", "fault"), [("plain", "no token"), ("chains", "no token"), ("chains", "raises")]
)
def test_a_sampler_that_fails_while_its_text_rests_ends_no_other(kind, fault):
    drafter, shape = KINDS[kind]
    for number in range(2, 17, 2):
        calls = 0

        def sampler(log_probs: mx.array) -> mx.array:
            nonlocal calls
            calls += 1
            if calls != number:  # noqa: B023
                return mx.argmax(log_probs, axis=-1)
            if fault == "raises":
                raise OSError("unplugged")
            return mx.array([VOCAB_SIZE])

        engine = _engine(drafter)
        options = {"max_tokens": NUM_TOKENS, "shared": engine.share(), **shape}
        streams = [engine.stream(one, **options) for one in (PROMPTS[0], PROMPTS[2])]
        streams.append(engine.stream(PROMPTS[1], sampler=sampler, **options))
        found, errors = read_at_random(streams, number)
        assert errors[:2] == [None, None]
        assert found[:2] == [EXPECTED[0], EXPECTED[2]]
        assert found[2] == EXPECTED[1][: len(found[2])]
        if len(found[2]) < NUM_TOKENS:
            assert isinstance(errors[2], OSError if fault == "raises" else ConfigError)


def test_no_pass_follows_an_unread_path_of_quantised_entries_or_a_batch(monkeypatch):
    """With compiled passes in use for a text with K/V entries of its own."""
    compile_passes(monkeypatch, uses=1)
    followed: list[type] = []
    at_call(monkeypatch, TreeCache, "follow", lambda cache, *_: followed.append(type(cache)))
    model = tiny_llama(seed=5, vocab_size=VOCAB_SIZE, head_size=32)
    drafter, shape = KINDS["trees"]
    engine, plain = (Engine(model, wrapped_tokenizer(VOCAB_SIZE), one) for one in (drafter, None))
    quantised = {"kv_bits": 8, "kv_group_size": 32, "max_tokens": NUM_TOKENS}
    for start in (0, 8):
        options = {**quantised, "quantized_kv_start": start}
        expected = [[r.token for r in plain.stream(one, **options)] for one in PROMPTS]
        assert [
            [r.token for r in engine.stream(p, **options, **shape)] for p in PROMPTS
        ] == expected
        batch = engine.stream_batch(PROMPTS, **options, **shape)
        assert batch_tokens(batch, len(PROMPTS)) == expected
    assert followed == []
    list(engine.stream(PROMPTS[0], max_tokens=NUM_TOKENS, **shape))
    assert set(followed) == {TreeCache}


def test_threads_look_ahead_with_the_same_compiled_passes(monkeypatch):
    compile_passes(monkeypatch, uses=1)
    first = _engine(KINDS["trees"][0])
    second = Engine(MODEL, wrapped_tokenizer(VOCAB_SIZE), KINDS["trees"][0], first.memory)
    options = {"max_tokens": 16, "temp": 1.0, "seed": 3}
    shapes = [KINDS["trees"][1], KINDS["chains"][1]]
    expected = [[r.token for r in _engine(None).stream(one, **options)] for one in PROMPTS]

    def work(number: int) -> Iterator[list[int]]:
        engine = (first, second)[number % 2]
        for prompt in PROMPTS:
            stream = engine.stream(prompt, **options, **shapes[number // 2 % 2])
            yield [r.token for r in stream]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda number: list(work(number)), range(4))) == [expected] * 4


@pytest.mark.parametrize("call", [1, 2])
def test_ctrl_c_in_the_prompt_of_a_text_that_is_read_later(call):
    engine = _engine("lookup")
    options: dict[str, Any] = {"shared": engine.share(), "max_tokens": NUM_TOKENS}
    progress = Mock(side_effect=[*[None] * (call - 1), KeyboardInterrupt])
    first = engine.stream(PROMPTS[0], prefill_step_size=2, **options)
    stopped = engine.stream(
        PROMPTS[1], prompt_progress_callback=progress, prefill_step_size=2, **options
    )
    last = engine.stream(PROMPTS[2], **options)
    options["shared"].begin([one._sequence for one in (first, stopped, last)])
    for one in (first, stopped):
        with pytest.raises(KeyboardInterrupt):
            next(one)
        if one is first:
            assert [response.token for response in last] == EXPECTED[2]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_nan_in_a_batch_end_one_text_and_leave_its_cache_as_it_is(kind):
    """The others' next pass must not overwrite the root of the tree that ended in NaN."""
    drafter, shape = KINDS[kind]
    for count, is_resting in itertools.product(range(3, 8), (False, True)):
        engine = _engine(drafter)
        cache, options = engine.new_prompt_cache(), {"shared": engine.share(), **shape}

        def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
            is_end = tokens.size == len(PROMPTS[0]) + count  # noqa: B023
            return logits * mx.nan if is_end else logits

        stream = engine.stream(PROMPTS[0], prompt_cache=cache, logits_processors=[spoil], **options)
        other = engine.stream(PROMPTS[1], max_tokens=NUM_TOKENS, **options)
        others, found = [next(other).token], list[int]()
        for _ in range(count - is_resting):
            found.append(next(stream).token)
        others += [response.token for response in other]
        with pytest.raises(NonFiniteError):
            found.extend(response.token for response in stream)
        assert (found, others) == (EXPECTED[0][:count], EXPECTED[1])
        assert_holds(cache, PROMPTS[0], found)


class Client:
    """An object in a reference cycle, which only the garbage collector ends, with its stream."""

    def __init__(self, stream: ResponseStream):
        self.itself, self.stream = self, stream


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["amid a pass", "in another thread"])
def test_streams_that_are_garbage_disturb_no_other(kind, where):
    drafter, options = KINDS[kind]
    engine = _engine(drafter)
    scheduler, layers = engine.share(), engine.new_prompt_cache()
    gone: list[weakref.ref[Client]] = []

    def collect(*given: Any) -> Any:
        if where == "amid a pass":
            gc.collect()
        return given[-1]

    def begin(**more: Any) -> ResponseStream:
        return engine.stream(PROMPTS[0], shared=scheduler, max_tokens=NUM_TOKENS, **options, **more)

    gc.disable()
    gc.freeze()  # what other tests have left takes seconds to look through
    try:
        stream = begin(logits_processors=[collect])
        tokens = [next(stream).token]
        while True:
            client = Client(begin(prompt_cache=layers if not gone else None))
            next(client.stream)
            gone.append(weakref.ref(client))
            del client
            if where != "amid a pass":
                in_another_thread(gc.collect)
            response = next(stream, None)
            if response is None:
                break
            tokens.append(response.token)
        gc.collect()  # the last pass may have begun before the first client was garbage
    finally:
        gc.unfreeze()
        gc.enable()
    assert tokens == EXPECTED[0]
    assert gone[0]() is None
    assert_holds(layers, PROMPTS[0], EXPECTED[0][:1])
