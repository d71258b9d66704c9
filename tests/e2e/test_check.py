"""``redrafter-mlx check``: equal texts, and the first difference of texts that are not."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.decoding.records import Token
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.engine import engine
from mlx_redrafter.target.caches.quantised import QuantisingCache
from tests.conftest import Trained
from tests.helpers.cli import Cli
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
def test_equal_texts(words: list[object], cli: Cli, options: list[object]) -> None:
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


def test_quantised_rows_from_the_first_token_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, quantise = [], QuantisingCache._quantise

    def watch(cache: QuantisingCache) -> None:
        lengths.append(cache.length)
        quantise(cache)

    monkeypatch.setattr(QuantisingCache, "_quantise", watch)
    result = cli("check", "-m", 24, *PROMPTS, "--kv-bits", 8)
    assert (result.code, result.out.count("equal: 24 tokens")) == (0, 2)
    assert len(lengths) == 2
    assert max(lengths) < 20


def test_a_difference_is_told_with_its_gap(
    stories: Trained, words: list[object], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
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
