"""The end of texts on a machine whose memory is used up, and the switch of the wired limit."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter import Engine, generate, memory_sizes, stream_generate
from mlx_redrafter.engine import memory_guard
from mlx_redrafter.errors import ResourceError
from tests.conftest import Trained

PROMPT = "Tim had a red ball. Tim had a"
END = 2 * memory_guard.EVERY


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fake readings, whether memory is short; after the last one it is short no longer."""
    left: list[bool] = []
    monkeypatch.setattr(memory_guard, "is_memory_short", lambda: bool(left) and left.pop(0))
    return left


def test_a_text_ends_at_the_second_short_reading(
    stories: Trained, readings: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_prompt_cache(stories.model)
    text = []
    with caplog.at_level(logging.WARNING):
        for last in stream_generate(
            stories.model, stories.tokenizer, PROMPT, max_tokens=100, prompt_cache=cache
        ):
            text.append(last)
            if len(text) == 1:  # the prompt's own readings are done
                readings += [True, True]
    stock = mlx_lm.generate(stories.model, stories.tokenizer, PROMPT, max_tokens=END)
    assert "".join(one.text for one in text) == stock
    assert (last.generation_tokens, last.finish_reason) == (END, "length")
    (line,) = (one.getMessage() for one in caplog.records if "memory" in one.getMessage())
    assert f"the text ends after {END} tokens" in line
    # The caller's cache holds the prompt and the text, as after any other end.
    num_prompt = len(stories.tokenizer.encode(PROMPT))
    assert cache[0].offset == num_prompt + END
    # The engine goes on.
    assert len(generate(stories.model, stories.tokenizer, PROMPT, max_tokens=END)) == len(stock)


def test_one_short_reading_ends_nothing(stories: Trained, readings: list[bool]) -> None:
    readings += [True, False] * 6
    stock = mlx_lm.generate(stories.model, stories.tokenizer, PROMPT, max_tokens=70)
    assert generate(stories.model, stories.tokenizer, PROMPT, max_tokens=70) == stock
    # Two in a row while a prompt is read are an error of one line.
    readings[:] = [True, True]
    with pytest.raises(ResourceError, match=r"used up after \d+ of \d+ prompt") as caught:
        generate(stories.model, stories.tokenizer, PROMPT * 4, max_tokens=4, prefill_step_size=8)
    assert "\n" not in str(caught.value)


def test_all_texts_of_a_batch_end(stories: Trained, readings: list[bool]) -> None:
    engine = Engine(stories.model, stories.tokenizer)
    tokens: list[list[Any]] = [[], []]
    for number, response in engine.stream_batch([PROMPT, PROMPT], max_tokens=100, seed=0):
        tokens[number].append(response)
        if not readings:
            readings += [True] * 100
    for one in tokens:
        assert (len(one), one[-1].finish_reason) == (END, "length")


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS reports a level of pressure")
def test_the_reading_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_sizes, "MEMINFO", tmp_path / "meminfo")
    for available, is_short in (("900", True), ("90000", False), (None, False)):
        last = "" if available is None else f"MemAvailable:  {available} kB\n"
        memory_sizes.MEMINFO.write_text(f"MemTotal:      100000 kB\nMemFree:  10 kB\n{last}")
        assert memory_sizes.is_memory_short() == is_short


def test_the_reading_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without macOS's function the pressure is 0, which is not short."""
    if sys.platform != "darwin":
        assert memory_sizes._read_pressure() == 0
    monkeypatch.setattr(memory_sizes.sys, "platform", "darwin")
    for level, is_short in ((1, False), (2, False), (4, True)):
        monkeypatch.setattr(memory_sizes, "_read_pressure", lambda level=level: level)
        assert memory_sizes.is_memory_short() == is_short


def test_the_wired_limit_is_a_switch(stories: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[Any] = []

    def limit(model: Any, streams: Any) -> Any:
        wired.append(model)
        return nullcontext()

    monkeypatch.setattr(memory_guard, "wired_limit", limit)
    for value, expected in (("1", 1), ("0", 1)):
        monkeypatch.setenv(memory_guard.SWITCH, value)
        generate(stories.model, stories.tokenizer, PROMPT, max_tokens=2)
        assert len(wired) == expected
