"""``redrafter-mlx check`` and ``try``: equal texts, and the first difference of others."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from mlx_redrafter.bench import machine, runs
from mlx_redrafter.decoding.delivery import Token
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.engine import engine
from mlx_redrafter.target.caches.quantised import QuantisingCache
from tests.conftest import Trained
from tests.helpers.calls import at_call
from tests.helpers.equality import ids, stock_tokens

PROMPTS = ["-p", "Once upon a time", "-p", "Lily"]


class BrokenText(SequenceDecoder):
    """Yields another token than the target's own at every drafted step's end."""

    def take(self) -> list[Token]:
        tokens = super().take()
        if tokens and self.drafting is not None and self.delivery.stats.num_tokens > 5:
            tokens[-1] = tokens[-1]._replace(id=(tokens[-1].id + 1) % 512)
        return tokens


@pytest.fixture
def words(stories: Trained, drafter_folder: Path) -> list[object]:
    return ["check", "--model", stories.folder, "--drafter", drafter_folder, "-m", 24]


@pytest.mark.parametrize("options", [[], ["--temp", 0.8, "--select", "beam"]], ids=str)
def test_equal_texts(words, cli, options):
    result = cli(*words, *PROMPTS, *options)
    assert (result.code, result.err) == (0, "")
    first, second = result.out.splitlines()
    assert first.startswith("equal: 24 tokens, 1.")
    assert first.endswith("tokens/step after 'Once upon a time'")
    assert second.endswith("after 'Lily'")
    result = cli(*words, "-p", "Lily", "--json", *options)
    assert (result.code, result.err) == (0, "")
    values = json.loads(result.out)
    (only,) = values["prompts"]
    assert (only["prompt"], only["num_tokens"], only["difference"]) == ("Lily", 24, None)
    assert values["equal"] is True
    assert only["tokens_per_step"] >= 1
    assert len(cli(*words, "-m", 4, *options).out.splitlines()) == 3  # prompts by default


def test_quantised_rows_from_the_first_token_on(cli, monkeypatch):
    lengths: list[int] = []
    note = lambda cache: lengths.append(cache.length)  # noqa: E731
    at_call(monkeypatch, QuantisingCache, "_quantise", note)
    result = cli("check", "-m", 24, *PROMPTS, "--kv-bits", 8)
    assert (result.code, result.out.count("equal: 24 tokens")) == (0, 2)
    assert len(lengths) == 2
    assert max(lengths) < 20


def test_a_difference_is_told_with_its_gap(stories, words, cli, monkeypatch):
    monkeypatch.setattr(engine, "SequenceDecoder", BrokenText)
    result = cli(*words, "-p", "Once upon a time")
    assert (result.code, result.err) == (1, "")
    (line,) = result.out.splitlines()
    assert line.startswith("different: token 6 of 24 after 'Once upon a time' is ")
    assert " instead of " in line
    assert "the two best differ by " in line

    result = cli(*words, "-p", "Once upon a time", "--json")
    assert (result.code, result.err) == (1, "")
    values = json.loads(result.out)
    assert values["equal"] is False
    difference = values["prompts"][0]["difference"]
    prompt: list[int] = stories.tokenizer.encode("Once upon a time")
    tokens = ids(stock_tokens(stories.model, prompt, 7))
    expected = {"position": 6, "expected": tokens[6], "found": (tokens[6] + 1) % 512}
    assert difference == {**difference, **expected}
    logits = mx.sort(stories.model(mx.array([[*prompt, *tokens[:6]]]))[0, -1])
    gap: Any = (logits[-1] - logits[-2]).item()
    assert difference["gap"] == pytest.approx(gap, abs=1e-3)


# The first command of a new user

TRIED = "Tim had a red ball. Tim had a"


@pytest.mark.parametrize("load", [0.0, 1000.0])
def test_the_text_is_printed_and_compared_with_mlx_lm(load, stories, cli, monkeypatch):
    monkeypatch.setattr(machine, "load_averages", lambda: [load])
    shown = cli("try", stories.folder, "-p", TRIED, "-m", 12)
    stock = mlx_lm.generate(stories.model, stories.tokenizer, TRIED, max_tokens=12)
    assert (shown.code, shown.out) == (0, stock + "\n")
    assert "equal, all 12 tokens" in shown.err
    assert "times mlx-lm's (median of 5 runs in turns)" in shown.err
    assert ("other programs keep 1000.0 of" in shown.err) == bool(load)


def test_a_difference_fails(stories, cli, monkeypatch):
    right = runs.stock_arm

    def wrong(settings: Any) -> Any:
        def decode(ids: list[int]) -> Iterator[Any]:
            for number, response in enumerate(right(settings)(ids)):
                yield replace(response, token=response.token + (number == 11))

        return decode

    monkeypatch.setattr(runs, "stock_arm", wrong)
    shown = cli("try", stories.folder, "-p", TRIED, "-m", 12)
    assert shown.code == 1
    assert "DIFFERENT from token 12 on" in shown.err


def test_an_impossible_name_is_all_that_is_said(cli, monkeypatch):
    monkeypatch.setattr(machine, "load_averages", lambda: [1000.0])
    for name, advised in (("llama3:8b", "llama3-8b-4bit"), ("Qwen3-4B:8bit", "Qwen3-4B-8bit")):
        refused = cli("try", name, "-p", TRIED)
        assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
        assert refused.err.endswith(
            f"names have no tags here; sizes and bits are parts of the name, as in {advised}\n"
        )
