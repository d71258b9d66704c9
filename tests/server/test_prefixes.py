"""Kept prompts: texts are those of a cold start, and little is processed twice."""

import errno
import os
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_redrafter import DraftModel
from mlx_redrafter.decoding import scheduler
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.generation_options import GenerationOptions
from mlx_redrafter.proposers.lookup.contexts import following
from mlx_redrafter.server.job import Job
from mlx_redrafter.server.models import LoadedModel
from mlx_redrafter.server.prefix_store import PrefixStore
from mlx_redrafter.server.protocols.openai_completions import read
from tests.helpers.agent_trace import Trace
from tests.helpers.models import random_drafter, tiny_llama, wrapped_tokenizer
from tests.models.tiny_models import VOCAB_SIZE, build, long_config, wide_config, windowed_config
from tests.property.test_lossless_networks import block, eagle

STEP = 32
OPTIONS = GenerationOptions(max_tokens=9, prefill_step_size=STEP)
QUANTISED = GenerationOptions(
    max_tokens=9, prefill_step_size=STEP, kv_bits=8, kv_group_size=32, quantized_kv_start=40
)


def _llama() -> nn.Module:
    return tiny_llama(seed=4, vocab_size=VOCAB_SIZE, context=4096)


def _long(config: dict[str, Any]) -> nn.Module:
    return build({**config, "max_position_embeddings": 4096})


def _with(make: Callable[..., Any], name: str) -> tuple[nn.Module, Any]:
    model = _llama()
    return model, make(model, name)


TOKENIZER = wrapped_tokenizer(VOCAB_SIZE)
KINDS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "plain": lambda: (_llama(), random_drafter(VOCAB_SIZE, 32)),
    "draft model": lambda: (_llama(), DraftModel(_llama(), TOKENIZER)),
    "EAGLE": lambda: _with(eagle, "EAGLE-3"),
    "block": lambda: _with(block, "DFlash 2"),
    "windows": lambda: (_long(windowed_config("gemma3_text")), "lookup"),
    "chunks": lambda: (_long(windowed_config("llama4")), "lookup"),
    "hybrid": lambda: (build(long_config("qwen3_5")), "lookup"),
    "states and windows": lambda: (build(long_config("recurrent_gemma")), None),
    "quantised": lambda: (build(wide_config("phi3")), None),
}
# Kinds of which not every position can be continued.
WITH_STATES = ("windows", "chunks", "hybrid", "states and windows")


def _load(kind: str, store: PrefixStore) -> LoadedModel:
    model, drafter = KINDS[kind]()
    engine = Engine(model, TOKENIZER, drafter)
    return LoadedModel(engine, QUANTISED if kind == "quantised" else OPTIONS, store)


@contextmanager
def _kept(kind: str, folder: Path | None, limit: int = 1 << 30) -> Iterator[LoadedModel]:
    """A model whose prompts are kept in memory and in a folder."""
    store = PrefixStore(limit, folder, 1 << 30)
    yield _load(kind, store)
    store.close()


def _write(
    loaded: LoadedModel, prompt: list[int], options: GenerationOptions, owner: str = ""
) -> tuple[list[int], int]:
    """Write a text as the worker does; return its tokens and the number of cached ones."""
    request, _ = read({"prompt": list(prompt)}, options)
    parts: list[Any] = []
    job = Job(loaded, request, request.prompts, lambda *received: parts.extend(received))
    job.owner = owner
    limits = random.Random(len(prompt))
    while job.step():
        # With a text of another model beside it, chunks are short.
        loaded.scheduler.advance(others_wait=limits.random() < 0.5)
    return TOKENIZER.encode("".join(part.content for part in parts)), job.num_cached


def _replay(
    kind: str, folder: Path | None, trace: Trace, known: dict[tuple[int, ...], list[int]]
) -> int:
    """Replay a trace; return the number of tokens processed. Every text is that of a cold start.

    ``known`` keeps the texts of cold starts.
    """
    options = QUANTISED if kind == "quantised" else OPTIONS
    cold, processed = _load(kind, PrefixStore(0)), 0

    with _kept(kind, folder) as loaded:

        def answer(prompt: list[int]) -> list[int]:
            nonlocal processed
            found, num_cached = _write(loaded, prompt, options)
            if tuple(prompt) not in known:
                known[tuple(prompt)], _ = _write(cold, prompt, options)
            assert found == known[tuple(prompt)], (kind, len(prompt), num_cached)
            processed += len(prompt) - num_cached
            return found

        trace.replay(answer)
    return processed


@pytest.mark.parametrize("kind", KINDS)
def test_an_agents_conversation(kind, tmp_path):
    """Hardly a token is processed twice, also after a restart."""
    num_turns, length = 6, 240
    trace, known = Trace(num_turns, length), dict[tuple[int, ...], list[int]]()
    processed = _replay(kind, tmp_path, trace, known)
    # Windows and states cannot be shortened, where an answer is repeated otherwise.
    assert trace.num_ideal / processed >= (0.85 if kind in WITH_STATES else 0.98)
    again = Trace(num_turns, length)
    assert _replay(kind, tmp_path, again, known) == num_turns  # the last token of every prompt


PROMPT = [1 + i % 50 for i in range(100)]


def test_another_clients_prompts_are_not_used(tmp_path):
    for _ in range(2):
        with _kept("plain", tmp_path) as loaded:
            cached = [_write(loaded, PROMPT, OPTIONS, owner)[1] for owner in ("one", "two", "one")]
            assert cached in ([0, 0, 99], [99, 99, 99])
            other = "three" + str(len(list(tmp_path.iterdir())))
            assert _write(loaded, PROMPT, OPTIONS, other)[1] == 0
    assert cached == [99, 99, 99]


def test_a_lookups_contexts_belong_to_one_clients_conversation():
    loaded = _load("windows", PrefixStore(1 << 30))
    answer, _ = _write(loaded, PROMPT, OPTIONS, "one")
    turn, prefixes = [*PROMPT, *answer, 7], loaded.prefixes
    assert len(prefixes.take(turn, "two").contexts.tokens) == 0
    assert len(prefixes.take([*PROMPT[:50], 7], "one").contexts.tokens) == 0, "other questions"
    contexts = prefixes.take(turn, "one").contexts
    assert contexts.tokens[: len(PROMPT) + 8].tolist() == turn[: len(PROMPT) + 8]
    assert contexts.candidates(reduce(following, PROMPT, 0))[0]
    assert len(prefixes.take(turn, "one").contexts.tokens) == 0, "one text at a time has them"


@pytest.mark.parametrize("change", ["weights", "config"])
def test_another_models_prompts_are_not_used(tmp_path, change):
    """With another config the same weights have other K/V entries."""
    cached = []
    for is_other in (False, True, False):
        is_new = is_other and change == "weights"
        model: Any = tiny_llama(5 if is_new else 4, VOCAB_SIZE, 4096)
        for layer in model.layers if is_other and not is_new else ():
            layer.self_attn.rope.base = 20_000.0
        store = PrefixStore(1 << 30, tmp_path, 1 << 30)
        loaded = LoadedModel(Engine(model, TOKENIZER, None), OPTIONS, store)
        cached.append(_write(loaded, PROMPT, OPTIONS)[1])
        store.close()
        assert len(list(tmp_path.glob("*.safetensors"))) == min(2, len(cached))
    assert cached == [0, 0, 99]


@pytest.mark.parametrize(
    ("kind", "damage"), [("plain", "bit"), ("hybrid", "cut"), ("plain", "foreign")]
)
def test_damaged_files(kind, damage, tmp_path, caplog):
    with _kept(kind, tmp_path) as loaded:
        expected, _ = _write(loaded, PROMPT, OPTIONS)
    files = sorted(tmp_path.glob("*.safetensors"))
    for path in files:
        raw = bytearray(path.read_bytes())
        if damage == "bit":
            raw[-5] ^= 1
        elif damage == "cut":
            del raw[len(raw) // 2 :]
        else:  # of another model, with a name that fits
            arrays, metadata = mx.load(str(path), return_metadata=True)  # type: ignore[misc]
            halves = {name: one[..., : one.shape[-1] // 2] for name, one in arrays.items()}  # type: ignore[union-attr]
            mx.save_safetensors(str(path), halves, metadata)  # type: ignore[arg-type]
            raw = bytearray(path.read_bytes())
            path.unlink()
            path = path.with_name(
                f"{path.name.partition('.')[0]}.{zlib.crc32(raw):08x}.safetensors"
            )
        path.write_bytes(raw)
    with _kept(kind, tmp_path) as loaded:
        found, num_cached = _write(loaded, PROMPT, OPTIONS)
    assert (found, num_cached) == (expected, 0)
    assert "set aside" in caplog.text
    assert list((tmp_path / "damaged").iterdir())


def test_a_full_disk_ends_the_writing(tmp_path, monkeypatch, caplog):
    def fail(path: str, *rest: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(mx, "save_safetensors", fail)
    with _kept("hybrid", tmp_path) as loaded:
        for count in (30, 60, 90):
            _write(loaded, PROMPT[:count], OPTIONS)
        assert _write(loaded, PROMPT, OPTIONS)[1] == 89  # memory goes on
    assert caplog.text.count("not kept on the disk any more") == 1
    assert list(tmp_path.iterdir()) == []


def test_bounds_in_bytes(tmp_path):
    """The oldest texts go first, and a prefix that is gone is processed again."""
    store = PrefixStore(300_000, tmp_path, 400_000)
    loaded = _load("plain", store)
    for start in range(1, 18):
        _write(loaded, [start, *PROMPT], OPTIONS)
        assert store.nbytes <= 300_000
    assert _write(loaded, [17, *PROMPT], OPTIONS)[1] == 100
    store.close()
    assert 200_000 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 400_000
    assert _write(loaded, [1, *PROMPT], OPTIONS)[1] == 0


def test_clients_whose_prompts_are_gone_leave_nothing():
    store = PrefixStore(300_000)
    loaded = _load("plain", store)
    for number in range(18):
        _write(loaded, PROMPT, OPTIONS, str(number))
    num_kept = len(store._memory)
    assert num_kept < 14
    assert len(loaded.prefixes._roots) <= num_kept + 2


def test_prompts_that_end_in_the_words_before_an_answer():
    """A hybrid learns where later prompts part from earlier ones, and keeps the states there."""
    loaded = _load("hybrid", PrefixStore(1 << 30))
    prompt, cached = list(PROMPT), []
    for turn in range(5):
        answer, num_cached = _write(loaded, [*prompt, 55, 56, 57], OPTIONS)
        cached.append((num_cached, len(prompt)))
        prompt += [54, *answer, *(1 + (turn * i) % 50 for i in range(20))]
    assert cached[0][0] == 0
    assert [num for num, _ in cached[2:]] == [length for _, length in cached[1:-1]]


def test_a_state_is_not_that_of_the_text_that_was_parted_from():
    """The second text parts from the first amid its tokens, and ends before they do."""
    loaded, cold = (_load("windows", PrefixStore(size)) for size in (1 << 30, 0))
    for prompt in (PROMPT[:40], [*PROMPT[:10], 55, 56, 57], PROMPT[:13], PROMPT[:21]):
        assert _write(loaded, prompt, OPTIONS)[0] == _write(cold, prompt, OPTIONS)[0]


def test_a_text_that_ends_before_the_first_pass_of_its_batch(monkeypatch):
    """A client may go just then; layers with states have no record of any pass yet."""
    # On a busy machine the first text would end while the second one's prompt waits.
    monkeypatch.setattr(scheduler, "time", Mock(perf_counter=lambda: 0.0))
    loaded = _load("hybrid", PrefixStore(0))
    requests = [read({"prompt": prompt}, OPTIONS)[0] for prompt in (PROMPT[:20], PROMPT[5:30])]
    first, second = (Job(loaded, one, one.prompts, lambda *parts: None) for one in requests)
    for _ in range(4):
        assert first.step()
        loaded.scheduler.advance()
    second.step()
    while len(list(loaded.scheduler.batch)) < 2:
        assert first.step()
        loaded.scheduler.advance()
    second.cancel()
    assert not second.step()
    assert len(list(loaded.scheduler.batch)) == 1


def test_nothing_is_kept_if_it_is_switched_off(tmp_path):
    with _kept("plain", tmp_path, limit=0) as loaded:
        assert [_write(loaded, PROMPT, OPTIONS)[1] for _ in range(2)] == [0, 0]
    assert list(tmp_path.iterdir()) == []
    memory = PrefixStore(1 << 30, tmp_path, 0)
    assert [_write(_load("plain", memory), PROMPT, OPTIONS)[1] for _ in range(2)] == [0, 0]
    assert list(tmp_path.iterdir()) == []
