"""``redrafter-mlx chat``: messages from stdin, answers on stdout."""

from __future__ import annotations

import io
from pathlib import Path

import mlx_lm
import pytest

from tests.conftest import Trained
from tests.helpers.cli import run


def _say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


@pytest.mark.parametrize("options", [[], ["--drafter", "none"]], ids=str)
def test_answers_are_those_to_the_whole_chat(
    stories: Trained,
    chat_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    messages = ["Hi", "Who is Tim", "And then"]
    chat = ["chat", "--model", chat_folder, "-m", 12, "--system-prompt", "Be good", *options]
    _say(monkeypatch, *messages)
    answers = run(capsys, *chat, "--verbose")
    assert answers.code == 0
    assert answers.err.count("tokens/s\n") == len(messages)
    text, expected = "[system]Be good", ""
    for message in messages:
        text += f"[user]{message}[assistant]"
        prompt = stories.tokenizer.encode(text, add_special_tokens=False)
        answer = mlx_lm.generate(stories.model, stories.tokenizer, prompt, max_tokens=12)
        text += answer
        expected += f"{answer}\n"
    assert answers.out == expected


def test_a_chat_begins_anew_and_ends(
    chat_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _say(monkeypatch, "Hi", "/reset", "", "Hi", "/exit", "Hi")
    answers = run(capsys, "chat", "--model", chat_folder, "-m", 8)
    half = len(answers.out) // 2
    assert answers.out[:half] == answers.out[half:] != ""


def test_chats_that_cannot_be(
    stories: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _say(monkeypatch, "Hi")
    bundled = run(capsys, "chat")
    assert (bundled.code, bundled.out) == (2, "")
    assert "give --model" in bundled.err
    untemplated = run(capsys, "chat", "--model", stories.folder)
    assert (untemplated.code, untemplated.out) == (2, "")
    assert "a model with a chat template" in untemplated.err
