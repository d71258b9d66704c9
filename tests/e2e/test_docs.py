"""README and docs: their commands are ones that there are, and their examples run."""

from __future__ import annotations

import io
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from http.server import HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from typer.main import get_command

from mlx_redrafter.bench.lab.__main__ import NAMES, make_parser
from mlx_redrafter.cli.main import app
from tests.conftest import Trained
from tests.helpers.cli import run
from tests.helpers.models import ROOT

PROGRAM = "redrafter-mlx"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "bench").rglob("*.md")),
]
# The changelog also names what is gone.
CHANGELOG = ROOT / "CHANGELOG.md"
# Options of mlx.launch, of uv, and of scripts of the bundled pair.
FOREIGN = {"--work", "--extra", "--from", "--hostfile", "--backend"}
FOREIGN |= {"--hosts", "--over", "--auto-setup", "--output"}
# Commands of these pages run in seconds; others train or measure.
RUN = ("generate", "check", "chat")


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _commands(page: Path) -> list[str]:
    """Commands in blocks and in sentences; a name in capitals stands for one of the reader's."""
    text = page.read_text(encoding="utf-8")
    lines = "\n".join(_blocks(text, "")).replace("\\\n", " ").splitlines()
    lines += re.findall(r"^    (.*)$", text.replace("\\\n", " "), re.MULTILINE)
    typed = [line.removeprefix("$ ").strip() for line in lines]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    typed += [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", prose)]
    typed = [re.sub(r"[\[\]]", "", one) for one in typed]  # around options that may be left out
    return [one for one in typed if re.match(f"{PROGRAM} (?!.*(COMMAND|bench NAME))", one)]


def _parse(words: list[str]) -> None:
    """Raise a usage error unless there is such a command with such options."""
    command: Any = get_command(app)
    name, parent = PROGRAM, None
    while True:
        context = command.make_context(name, words, parent=parent)
        if not hasattr(command, "commands"):
            return
        words = [*context._protected_args, *context.args]
        name, command, words = command.resolve_command(context, words)
        parent = context


def _options() -> dict[tuple[str, ...], set[str]]:
    """Options of every command, by the words that call it; those of the laboratory, too."""
    top: Any = get_command(app)
    commands = {(): top, **{(name,): one for name, one in top.commands.items()}}
    for name, one in top.commands.items():
        commands |= {(name, inner): it for inner, it in getattr(one, "commands", {}).items()}
    found = {
        words: {"--help", *(option for one in command.params for option in one.opts)}
        for words, command in commands.items()
    }
    for name in NAMES:
        found["lab", name] = set(re.findall(r"--[a-z-]+", make_parser(name)[1].format_help()))
    return found


def _quotations(page: Path) -> list[str]:
    """Spans and blocks of code; a line that goes on in the next one is one line."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", prose)]
    return spans + "\n".join(blocks).splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    options = _options()
    known = set().union(*options.values(), FOREIGN)
    dead = []
    for quotation in _quotations(page):
        words = tuple(quotation.removeprefix(f"{PROGRAM} ").split())
        # A command may be quoted without the name of the program, as in `check --json`.
        own = options.get(words[:2]) or options.get(words[:1]) or known
        dead += [one for one in re.findall(r"(?<!\S)--[a-z][a-z-]*", quotation) if one not in own]
    assert dead == []


@pytest.mark.parametrize("page", [*PAGES, CHANGELOG], ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for command in _commands(page):
        words = shlex.split(command, comments=True)[1:]
        named_only = len(words) == 1 or words[-1] == "--help"
        if not named_only and not words[0].startswith("-"):
            _parse(words)


def test_a_command_that_does_not_exist_is_noticed() -> None:
    for words in (["generate", "--no-such"], ["no-such"], ["bench", "no-such"]):
        with pytest.raises(Exception, match="such"):
            _parse(words)


def test_the_example_of_the_readme_is_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = (one for one in _blocks(PAGES[0].read_text(), "") if one.startswith("$ "))
    command, _, output = shown.removeprefix("$ ").partition("\n")
    text = output.partition("=" * 10)[0]
    for _ in range(2):
        assert run(capsys, *shlex.split(command, comments=True)[1:]).out == text


@pytest.mark.parametrize("page", [PAGES[0], ROOT / "docs" / "python.md"], ids=lambda p: p.name)
def test_python_examples_run(
    page: Path,
    chat_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[str] = []
    monkeypatch.setattr(HTTPServer, "serve_forever", lambda server: _ask(server, answers))
    namespace: dict[str, Any] = {}
    blocks = _blocks(page.read_text(encoding="utf-8"), "python")
    for block in blocks:
        code = block.replace("path-or-repo", str(chat_folder)).replace("8000", "0")
        exec(code, namespace)
    assert len(capsys.readouterr().out) > 100
    assert len(answers) == sum("serve_forever" in block for block in blocks)
    assert all(len(answer) > 100 for answer in answers)


def _ask(server: HTTPServer, answers: list[str]) -> None:
    """Serve one request, made here."""
    host, port = server.server_address[:2]

    def post() -> None:
        request = Request(f"http://{host!s}:{port}", data=b"Once upon a time")
        with urlopen(request, timeout=300) as reply:
            answers.append(reply.read().decode())

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(post)
        server.handle_request()
        asking.result()
    server.server_close()


def test_commands_of_the_command_line_page_run(
    stories: Trained,
    chat_folder: Path,
    drafter_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"MODEL": chat_folder, "DRAFTER": drafter_folder, "SMALLER-MODEL": stories.folder}
    done = []
    for command in _commands(ROOT / "docs" / "command-line.md"):
        words = [str(names.get(word, word)) for word in shlex.split(command, comments=True)[1:]]
        if words[0] in RUN:
            monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
            found = run(capsys, *words, "-m", 8)
            assert found.code == 0, found.err
            assert found.out
            done.append(words[0])
    assert set(done) == set(RUN)
