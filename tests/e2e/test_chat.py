"""``redrafter-mlx chat``: messages from stdin, answers on stdout."""

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from mlx_redrafter.engine import conversation
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import ResourceError
from tests.helpers.calls import at_call
from tests.helpers.cli import PROGRAM, Cli, Result, python
from tests.helpers.models import change_config

Chat = Callable[..., Result]


@pytest.fixture
def chat(chat_folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """A function that says lines to a command, by default a chat with a model, and options."""

    def say(lines: list[str], *options: object, command: object = ("chat", chat_folder)) -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return cli(*command, *options)

    return say


@pytest.mark.parametrize("options", [[], ["--drafter", "none"]], ids=str)
def test_answers_are_those_to_the_whole_chat(stories, chat, options):
    """It begins anew at /reset, and ends at /exit."""
    messages = ["Hi", "Who is Tim", "/reset", "", "And then", "/exit", "Hi"]
    answers = chat(messages, "-m", 12, "--system-prompt", "Be good", *options, "--verbose").done()
    assert answers.err.count("tokens/s\n") == 3
    text, expected = "[system]Be good", ""
    for message in ("Hi", "Who is Tim", "And then"):
        text = text if message != "And then" else "[system]Be good"
        text += f"[user]{message}[assistant]"
        prompt = stories.tokenizer.encode(text, add_special_tokens=False)
        answer = mlx_lm.generate(stories.model, stories.tokenizer, prompt, max_tokens=12)
        text += answer
        expected += f"{answer}\n"
    assert answers.out == expected


def test_the_end_of_the_input_ends_a_message_of_several_lines(chat):
    closed = chat(['"""Who', 'is Tim"""'], "-m", 4)
    assert closed.out == chat(['"""Who', "is Tim"], "-m", 4).out != ""


def test_chats_that_cannot_be(stories, chat):
    named = ("--model", stories.folder)
    for words, message in (((), "give --model"), (named, "a model with a chat template")):
        found = chat(["Hi"], command=("chat", *words))
        assert (found.code, found.out) == (2, "")
        assert message in found.err


def test_a_chat_goes_on_at_the_end_of_its_context(chat_folder, tmp_path, chat, monkeypatch):
    """Three times the context: the oldest turns go, the system's message stays."""
    model = tmp_path / "model"
    shutil.copytree(chat_folder, model)
    context = 96
    change_config(model, max_position_embeddings=context)

    def check(tokenizer: Any, messages: list[Any], *_: Any, **options: Any) -> None:
        assert messages[0] == {"role": "system", "content": "Be good"}

    at_call(monkeypatch, conversation, "encode_chat", check)
    lines = [*["Tell me of a cat and a dog"] * 9, "x" * 4000, "Hi"]
    found = chat(lines, "-m", 60, "--system-prompt", "Be good", command=("chat", model)).done()
    assert found.err.count(f"the model's context of {context} tokens is full") >= 3
    assert found.err.count("error: ") == 1  # of the message that is too long by itself
    assert f"the model's context is {context}" in found.err or f"at most {context}" in found.err
    assert "is now longer than the model's context" not in found.err
    tokenizer = mlx_lm.load(str(model))[1]
    assert len(tokenizer.encode(found.out)) > 3 * context


def test_a_message_beyond_the_memory_loses_no_other(tmp_path, chat, monkeypatch):
    def refuse(engine: Engine, prompt: Any, **_: Any) -> None:
        if len(prompt) > 60:
            raise ResourceError("the prompt does not fit into memory")

    at_call(monkeypatch, Engine, "stream", refuse)
    file = tmp_path / "chat.jsonl"
    found = chat(
        ["Who is Tim", "word " * 60, f"/save {file}"], "-m", 8, "--drafter", "lookup"
    ).done()
    assert "error: the prompt does not fit into memory" in found.err
    saved = json.loads(file.read_text())["messages"]
    assert [one["role"] for one in saved] == ["user", "assistant"]


def test_a_message_that_is_no_text_loses_no_other(chat_folder):
    words = ("chat", chat_folder, "-m", 4, "--drafter", "lookup")
    variables = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    how: Any = {"input": b"\xff\nHi\n", "env": variables, "text": False, "check": True}
    ended = python(*PROGRAM, *words, **how)
    assert ended.stderr.startswith(b"error: the prompt must be UTF-8 text")
    assert ended.stdout


def test_commands_of_a_chat(chat_folder, tmp_path, chat):
    file, other = tmp_path / "chat.jsonl", tmp_path / "other"
    other.write_text("mine")
    lines = ['"""Who', 'is Tim"""', f"/save {file}", f"/save {file}", f"/save {other}", "/save"]
    lines += ["/help", "/set temp 0.5", "/set temp -1", "/set no 1", "/set system Be good", "/set"]
    lines += ["/nonsense", "/save ~no-such-user.jsonl", "/bye", "Hi"]
    options = ("-m", 8, "--temp", 0, "--drafter", "lookup")
    found = chat(lines, *options, command=("run", chat_folder)).done()
    saved = json.loads(file.read_text())["messages"]
    assert [one["role"] for one in saved] == ["user", "assistant"]
    assert saved[0]["content"] == "Who\nis Tim"
    assert other.read_text() == "mine"
    for part in ("other exists", "say /save FILE", "/reset ", "temp=0.5", "system=Be good"):
        assert part in found.err
    assert found.err.count("error: ") == 6
    assert len(found.out.splitlines()) == len(saved[1]["content"].splitlines())
