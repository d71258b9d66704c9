"""The first command of a new user: a text, both speeds, and whether the texts are equal."""

from __future__ import annotations

from typing import Any

import mlx_lm
import pytest

from mlx_redrafter.cli import try_out
from tests.conftest import Trained
from tests.helpers.cli import run

PROMPT = "Tim had a red ball. Tim had a"


def _try(capsys: pytest.CaptureFixture[str], folder: object) -> Any:
    return run(capsys, "try", folder, "-p", PROMPT, "-m", 12)


def test_the_text_is_printed_and_compared_with_mlx_lm(
    stories: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _try(capsys, stories.folder)
    stock = mlx_lm.generate(stories.model, stories.tokenizer, PROMPT, max_tokens=12)
    assert (shown.code, shown.out) == (0, stock + "\n")
    assert "equal, all 12 tokens" in shown.err
    assert "times mlx-lm's (median of 5 runs in turns)" in shown.err


def test_a_difference_is_an_error(
    stories: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = try_out._by_mlx_lm

    def wrong(*arguments: Any) -> Any:
        made = right(*arguments)
        return made._replace(tokens=[*made.tokens[:-1], made.tokens[-1] + 1])

    monkeypatch.setattr(try_out, "_by_mlx_lm", wrong)
    shown = _try(capsys, stories.folder)
    assert shown.code == 1
    assert "DIFFERENT from token 12 on" in shown.err
