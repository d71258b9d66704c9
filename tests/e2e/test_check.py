"""``redrafter-mlx check``: equal texts, and the first difference of texts that are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.decoding.records import Token
from mlx_redrafter.decoding.sequence import SequenceDecoder
from mlx_redrafter.engine import engine, generation
from mlx_redrafter.target.caches.quantised import QuantisingCache
from tests.conftest import Trained
from tests.helpers.cli import run

PROMPTS = ["-p", "Once upon a time", "-p", "Lily"]


class BrokenText(SequenceDecoder):
    """Yields another token than the target's own at every drafted step's end."""

    def take(self) -> list[Token]:
        tokens = super().take()
        if tokens and self.drafting is not None and self.delivery.stats.num_tokens > 5:
            tokens[-1] = tokens[-1]._replace(id=(tokens[-1].id + 1) % 512)
        return tokens


def _options(stories: Trained, drafter: Path) -> list[object]:
    return ["check", "--model", stories.folder, "--drafter", drafter, "-m", 24]


@pytest.mark.parametrize("options", [[], ["--temp", 0.8, "--select", "beam"]], ids=str)
def test_equal_texts(
    stories: Trained,
    drafter_folder: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[object],
) -> None:
    result = run(capsys, *_options(stories, drafter_folder), *PROMPTS, *options)
    assert (result.code, result.err) == (0, "")
    first, second = result.out.splitlines()
    assert first.startswith("equal: 24 tokens, 1.")
    assert first.endswith("tokens/step after 'Once upon a time'")
    assert second.endswith("after 'Lily'")


def test_quantised_rows_from_the_first_token_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, quantise = [], QuantisingCache._quantise

    def watch(cache: QuantisingCache) -> None:
        lengths.append(cache.length)
        quantise(cache)

    monkeypatch.setattr(QuantisingCache, "_quantise", watch)
    result = run(capsys, "check", "-m", 24, *PROMPTS, "--kv-bits", 8)
    assert (result.code, result.out.count("equal: 24 tokens")) == (0, 2)
    assert len(lengths) == 2
    assert max(lengths) < 20


def test_three_prompts_by_default(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, *_options(stories, drafter_folder), "-m", 4)
    assert result.code == 0
    assert len(result.out.splitlines()) == 3


def test_a_difference_is_told_with_its_gap(
    stories: Trained,
    drafter_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "SequenceDecoder", BrokenText)
    options = [*_options(stories, drafter_folder), "-p", "Once upon a time"]
    result = run(capsys, *options)
    assert (result.code, result.err) == (1, "")
    (line,) = result.out.splitlines()
    assert line.startswith("different: token 6 of 24 after 'Once upon a time' is ")
    assert " instead of " in line
    assert "the two best differ by " in line

    result = run(capsys, *options, "--json")
    assert (result.code, result.err) == (1, "")
    values = json.loads(result.out)
    assert values["equal"] is False
    difference = values["prompts"][0]["difference"]
    prompt = stories.tokenizer.encode("Once upon a time")
    plain = [r.token for r in _plain(stories, prompt)]
    assert difference["position"] == 6
    assert difference["expected"] == plain[6]
    assert difference["found"] == (plain[6] + 1) % 512
    logits = mx.sort(_log_probs(stories, [*prompt, *plain[:6]]))
    gap: Any = (logits[-1] - logits[-2]).item()
    assert difference["gap"] == pytest.approx(gap, abs=1e-3)


def _plain(stories: Trained, prompt: list[int]) -> list[Any]:
    return list(
        generation.stream_generate(
            stories.model, stories.tokenizer, prompt, drafter=None, max_tokens=24
        )
    )


def _log_probs(stories: Trained, tokens: list[int]) -> mx.array:
    logits: mx.array = stories.model(mx.array([tokens]))[0, -1]
    return logits - mx.logsumexp(logits)


def test_json_of_equal_texts(
    stories: Trained, drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, *_options(stories, drafter_folder), "-p", "Lily", "--json")
    assert (result.code, result.err) == (0, "")
    values = json.loads(result.out)
    assert values["equal"] is True
    (only,) = values["prompts"]
    assert (only["prompt"], only["num_tokens"], only["difference"]) == ("Lily", 24, None)
    assert only["tokens_per_step"] >= 1
