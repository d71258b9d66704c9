"""``redrafter-mlx chat``: messages from stdin, answers on stdout."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from mlx_redrafter.engine import prompt_encoding
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import ResourceError
from tests.conftest import Trained
from tests.helpers.cli import Cli


def _say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


@pytest.mark.parametrize("options", [[], ["--drafter", "none"]], ids=str)
def test_answers_are_those_to_the_whole_chat(
    stories: Trained,
    chat_folder: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    """It begins anew at /reset, and ends at /exit."""
    messages = ["Hi", "Who is Tim", "/reset", "", "And then", "/exit", "Hi"]
    chat = ["chat", "--model", chat_folder, "-m", 12, "--system-prompt", "Be good", *options]
    _say(monkeypatch, *messages)
    answers = cli(*chat, "--verbose")
    assert answers.code == 0
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


def test_the_end_of_the_input_ends_a_message_of_several_lines(
    chat_folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = "chat", "--model", chat_folder, "-m", 4
    _say(monkeypatch, '"""Who', 'is Tim"""')
    closed = cli(*chat)
    _say(monkeypatch, '"""Who', "is Tim")
    assert closed.out == cli(*chat).out != ""


def test_chats_that_cannot_be(stories: Trained, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    _say(monkeypatch, "Hi")
    bundled = cli("chat")
    assert (bundled.code, bundled.out) == (2, "")
    assert "give --model" in bundled.err
    untemplated = cli("chat", "--model", stories.folder)
    assert (untemplated.code, untemplated.out) == (2, "")
    assert "a model with a chat template" in untemplated.err


def test_a_chat_goes_on_at_the_end_of_its_context(
    chat_folder: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times the context: the oldest turns go, the system's message stays."""
    model = tmp_path / "model"
    shutil.copytree(chat_folder, model)
    config = json.loads((model / "config.json").read_text())
    context = 96
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    seen: list[int] = []
    encode = prompt_encoding.encode_chat

    def watch(*args: Any, **options: Any) -> list[int]:
        tokens = encode(*args, **options)
        assert args[1][0] == {"role": "system", "content": "Be good"}
        seen.append(len(tokens))
        return tokens

    monkeypatch.setattr("mlx_redrafter.engine.conversation.encode_chat", watch)
    _say(monkeypatch, *["Tell me of a cat and a dog"] * 9, "x" * 4000, "Hi")
    chat = cli("chat", "--model", model, "-m", 60, "--system-prompt", "Be good")
    assert chat.code == 0
    assert chat.err.count(f"the model's context of {context} tokens is full") >= 3
    assert chat.err.count("error: ") == 1  # of the message that is too long by itself
    assert f"the model's context is {context}" in chat.err or f"at most {context}" in chat.err
    assert "is now longer than the model's context" not in chat.err
    tokenizer = mlx_lm.load(str(model))[1]
    assert len(tokenizer.encode(chat.out)) > 3 * context


def test_a_message_that_does_not_fit_into_memory_loses_no_other(
    chat_folder: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Engine.stream

    def refusing(engine: Engine, prompt: Any, **options: Any) -> Any:
        if len(prompt) > 60:
            raise ResourceError("the prompt does not fit into memory")
        return stream(engine, prompt, **options)

    monkeypatch.setattr(Engine, "stream", refusing)
    file = tmp_path / "chat.jsonl"
    _say(monkeypatch, "Who is Tim", "word " * 60, f"/save {file}")
    chat = cli("chat", chat_folder, "-m", 8, "--drafter", "lookup")
    assert chat.code == 0
    assert "error: the prompt does not fit into memory" in chat.err
    saved = json.loads(file.read_text())["messages"]
    assert [one["role"] for one in saved] == ["user", "assistant"]


def test_commands_of_a_chat(
    chat_folder: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "chat.jsonl", tmp_path / "other"
    other.write_text("mine")
    lines = ['"""Who', 'is Tim"""', f"/save {file}", f"/save {file}", f"/save {other}", "/save"]
    lines += ["/help", "/set temp 0.5", "/set temp -1", "/set no 1", "/set system Be good", "/set"]
    lines += ["/nonsense", "/save ~no-such-user.jsonl", "/bye", "Hi"]
    _say(monkeypatch, *lines)
    chat = cli("run", chat_folder, "-m", 8, "--temp", 0, "--drafter", "lookup")
    assert chat.code == 0
    saved = json.loads(file.read_text())["messages"]
    assert [one["role"] for one in saved] == ["user", "assistant"]
    assert saved[0]["content"] == "Who\nis Tim"
    assert other.read_text() == "mine"
    for part in ("other exists", "say /save FILE", "/reset ", "temp=0.5", "system=Be good"):
        assert part in chat.err
    assert chat.err.count("error: ") == 6
    assert len(chat.out.splitlines()) == len(saved[1]["content"].splitlines())
