"""The first command of a new user: a text, both speeds, and whether the texts are equal."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx_lm
import pytest

from mlx_redrafter.bench import machine, runs
from tests.conftest import Trained
from tests.helpers.cli import run

PROMPT = "Tim had a red ball. Tim had a"


def _try(capsys: pytest.CaptureFixture[str], folder: object) -> Any:
    return run(capsys, "try", folder, "-p", PROMPT, "-m", 12)


@pytest.mark.parametrize("load", [0.0, 1000.0])
def test_the_text_is_printed_and_compared_with_mlx_lm(
    load: float,
    stories: Trained,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "load_averages", lambda: [load])
    shown = _try(capsys, stories.folder)
    stock = mlx_lm.generate(stories.model, stories.tokenizer, PROMPT, max_tokens=12)
    assert (shown.code, shown.out) == (0, stock + "\n")
    assert "equal, all 12 tokens" in shown.err
    assert "times mlx-lm's (median of 5 runs in turns)" in shown.err
    assert ("other programs keep 1000.0 of" in shown.err) == bool(load)


def test_a_difference_is_an_error(
    stories: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = runs.stock_arm

    def wrong(settings: Any) -> Any:
        def decode(ids: list[int]) -> Iterator[Any]:
            for number, response in enumerate(right(settings)(ids)):
                yield replace(response, token=response.token + (number == 11))

        return decode

    monkeypatch.setattr(runs, "stock_arm", wrong)
    shown = _try(capsys, stories.folder)
    assert shown.code == 1
    assert "DIFFERENT from token 12 on" in shown.err


def test_an_impossible_name_is_all_that_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "load_averages", lambda: [1000.0])
    refused = _try(capsys, "llama3:8b")
    assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
    assert "names have no tags here" in refused.err
