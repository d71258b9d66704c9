"""README and docs: their commands are ones that there are, and their examples run."""

import argparse
import io
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import HTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from urllib.request import urlopen

import pytest
import typer

from mlx_redrafter.bench.lab.__main__ import NAMES, make_parser
from mlx_redrafter.bench.lab.real_models import SMOLLM2
from mlx_redrafter.cli.main import app
from tests.helpers.cli import commands
from tests.helpers.models import ROOT, real_folder
from tests.test_prose import PAGES

PROGRAM = "redrafter-mlx"
LABORATORY = "python -m mlx_redrafter.bench.lab"
# A program of this package and the words after it, up to the end of the shell's command.
LINE = re.compile(
    rf"(?:^|[\s/])({PROGRAM}|python -m mlx_redrafter[\w.]*)(?=\s|$)((?:(?! \d?[<>])[^|;])*)"
)
README = ROOT / "README.md"
# The changelog also names what is gone.
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
# Options of mlx.launch, of uv, and of scripts of the bundled pair.
FOREIGN = {"--work", "--extra", "--from", "--hostfile", "--backend"}
FOREIGN |= {"--hosts", "--over", "--auto-setup", "--output", "--hf-path", "--mlx-path"}
# Commands of these pages run in seconds; others train or measure.
RUN = ("generate", "check", "chat")


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


class _Line(NamedTuple):
    """A command line on a page: its program, the words after it, and whether it may be shortened.

    Sentences also name a command alone, without the arguments that it needs.
    """

    program: str
    words: list[str]
    is_in_sentence: bool


def _lines(page: Path) -> Iterator[_Line]:
    """Command lines in blocks and in sentences; a name in capitals stands for one of the reader's.

    Those for any command are left out. What starts the program, such as ``uv run`` or
    ``mlx.launch``, is not part of a line.
    """
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    typed = "\n".join(_blocks(text, r"\w*")).splitlines()
    typed += re.findall(r"^    (.*)$", prose, re.MULTILINE)
    spans = [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", prose)]
    spans = [re.sub(r"[\[\]]", "", one) for one in spans]  # around options that may be left out
    for number, line in enumerate([*typed, *spans]):
        for part in line.split(" && "):
            found = LINE.search(part)
            words = shlex.split(found[2], comments=True) if found else []
            is_in_sentence = number >= len(typed)
            is_about_any = (
                "COMMAND" in words or words[:1] == ["NAME"] or words[:2] == ["bench", "NAME"]
            )
            if found and not (is_about_any if words else is_in_sentence):
                yield _Line(found[1], words, is_in_sentence)


def _commands(page: Path) -> list[list[str]]:
    return [line.words for line in _lines(page) if line.program == PROGRAM and line.words]


def _check(line: _Line) -> None:
    """Parse a line by the parser of its program; raise a usage error if it does not fit."""
    is_name = line.is_in_sentence and len(line.words) == 1 + (line.words[:1] == ["bench"])
    if line.program in (PROGRAM, "python -m mlx_redrafter"):
        _parse([*line.words, *(["--help"] if is_name else [])])
    elif line.program == LABORATORY:
        _, parser = make_parser(line.words[0])
        if not is_name:
            parser.parse_args(line.words[1:])
    else:
        _parse_by_module(line.program.removeprefix("python -m "), line.words)


def _parse(words: list[str]) -> None:
    """Raise a usage error unless there is such a command with such options and arguments."""
    with mock.patch("typer.core.TyperCommand.invoke"):
        app(words, PROGRAM, standalone_mode=False)


class _Parsed(Exception):
    """The arguments are parsed."""


def _parse_by_module(module: str, words: list[str]) -> None:
    """Run a module's ``main`` until it has parsed its arguments."""
    real = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser) -> None:
        real(parser, words)
        raise _Parsed

    main = import_module(module).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        with pytest.raises(_Parsed):
            main()


def _options() -> set[str]:
    """Options of every command, and those of the laboratory."""
    found = {option for one in commands().values() for param in one.params for option in param.opts}
    for name in NAMES:
        found |= set(re.findall(r"--[a-z-]+", make_parser(name)[1].format_help()))
    return found


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_options_exist(page):
    """Also those outside of command lines, which the next test parses."""
    quoted = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text(encoding="utf-8")))
    assert quoted <= {*_options(), "--help", *FOREIGN}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_is_parsed_by_its_program(page):
    wrong = []
    for line in _lines(page):
        try:
            _check(line)
        except (typer.TyperException, SystemExit, ModuleNotFoundError) as error:
            wrong.append(f"{line.program} {shlex.join(line.words)}: {error!r}")
    assert wrong == []


@pytest.mark.parametrize(
    "typed",
    [
        "redrafter-mlx generate --no-such",
        "redrafter-mlx bench share x.json",  # without --out
        f"{LABORATORY} tables --no-such",
        f"{LABORATORY}.real_pairs PAIRS.json",
    ],
)
def test_a_line_that_does_not_fit_is_noticed(typed, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"```\nA=1 mlx.launch -n 2 .venv/bin/{typed} 2> log\n```\n")
    (line,) = _lines(page)
    with pytest.raises((typer.TyperException, SystemExit, ModuleNotFoundError)):
        _check(line)


def test_every_command_on_the_pages_is_run_by_a_test():
    tests = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    called = set(re.findall(r"""\(\s*(?:capsys,\s*)?\[?"([a-z]+)",""", tests))
    quoted = {words[0] for page in CURRENT for words in _commands(page)}
    assert {one for one in quoted if not one.startswith("-")} <= called


@pytest.mark.timeout(900)  # it may be the first to ask for the model
@pytest.mark.parametrize("number", [0, 1], ids=["bundled", "published"])
def test_the_readme_shows_what_is_printed(number, cli, monkeypatch):
    monkeypatch.setattr("mlx_redrafter.cli.try_out.ROUNDS", 1)
    (shown,) = (one for one in _blocks(README.read_text(), "") if one.startswith("$ "))
    command, *lines = shown.split("$ ")[1 + number].strip().splitlines(keepends=True)
    words = [real_folder(SMOLLM2) if "/" in one else one for one in shlex.split(command)]
    end = lines.index("=" * 10 + "\n")
    assert cli(*words[1:]).done().out == "".join(lines[:end])
    assert len(lines) == end + 5


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "python.md"], ids=lambda p: p.name)
def test_python_examples_run(page, chat_folder, capsys, monkeypatch):
    answers: list[str] = []
    monkeypatch.setattr(HTTPServer, "serve_forever", lambda server: _ask(server, answers))
    namespace: dict[str, Any] = {}
    blocks = _blocks(page.read_text(encoding="utf-8"), "python")
    for block in blocks:
        code = block.replace("path-or-repo", str(chat_folder)).replace("8000", "0")
        exec(code, namespace)
    printed = capsys.readouterr().out
    assert len(printed) > 100
    assert re.search(r"^\d\.\d\d tokens per step", printed, re.MULTILINE)
    assert len(answers) == sum("serve_forever" in block for block in blocks)
    assert all(len(answer) > 100 for answer in answers)


def _ask(server: HTTPServer, answers: list[str]) -> None:
    """Serve one request, made here."""
    host, port = server.server_address[:2]

    def post() -> str:
        with urlopen(f"http://{host!s}:{port}", b"Once upon a time", timeout=300) as reply:
            return reply.read().decode()

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(post)
        server.handle_request()
        answers.append(asking.result())
    server.server_close()


def test_commands_of_the_command_line_page_run(chat_folder, drafter_folder, cli, monkeypatch):
    names = {"MODEL": chat_folder, "DRAFTER": drafter_folder, "SMALLER-MODEL": chat_folder}
    done = []
    for command in _commands(ROOT / "docs" / "command-line.md"):
        words = [str(names.get(word, word)) for word in command]
        if words[0] in RUN:
            monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
            assert cli(*words, "-m", 4).done().out
            done.append(words[0])
    assert set(done) == set(RUN)


def test_the_laboratorys_page_lists_every_command():
    page = (ROOT / "bench" / "lab" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)", page, re.MULTILINE)) == set(NAMES)
