"""Help and completion: every command, as it is called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from mlx_redrafter.cli.main import app
from tests.helpers.cli import run
from tests.helpers.models import ROOT


def _commands() -> list[tuple[str, ...]]:
    top = get_command(app)
    names: list[tuple[str, ...]] = [()]
    for name, command in top.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", {})
        names += [(name,), *((name, one) for one in inner)] if not command.hidden else []
    return names


def summaries() -> dict[str, str]:
    """First paragraphs of the help texts, by the words that call a command."""
    found = {}
    for names in _commands()[1:]:
        command: Any = get_command(app)
        for name in names:
            command = command.commands[name]
        first, *_ = (command.help or "").split("\n\n")
        found[" ".join(names)] = " ".join(first.split())
    return found


def test_the_table_of_commands_is_that_of_the_help() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    table, *_ = page.partition("| command | does |\n|---|---|\n")[2].partition("\n\n")
    rows = (row.strip("| ").split(" | ") for row in table.splitlines())
    assert {name.strip("`"): summary for name, summary in rows} == summaries()


@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_help_shows_how_a_command_is_called(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    shown = run(capsys, *command, "--help")
    assert shown.code == 0
    assert f"Usage: {' '.join(('redrafter-mlx', *command))} " in shown.out
    assert "<bool>" not in shown.out
    assert "--help" in shown.out


@pytest.mark.parametrize("columns", [40, 80])
def test_names_of_options_are_whole(columns: int) -> None:
    for name in ("generate", "serve"):
        words = [sys.executable, "-m", "mlx_redrafter", name, "--help"]
        environment = {**os.environ, "COLUMNS": str(columns)}
        shown = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        for option in get_command(app).commands[name].params:  # type: ignore[attr-defined]
            assert all(one in shown.stdout for one in option.opts if one.startswith("--")), option


def test_names_of_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ls", "--json").out == run(capsys, "list", "--json").out
    assert run(capsys, "genrate").err.endswith("Did you mean 'generate'?\n")
    unknown = run(capsys, "ps")
    assert (unknown.code, unknown.err.count("\n")) == (2, 1)
    assert unknown.err.endswith("No such command 'ps'. redrafter-mlx --help lists all.\n")


def test_no_command_is_left_out() -> None:
    names = {" ".join(command) for command in _commands()}
    assert {"generate", "chat", "check", "train", "convert"} <= names
    assert {f"bench {one}" for one in ("compare", "share", "speed", "sweep", "throughput")} <= names


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("ge", ["generate"]),
        ("con", ["convert"]),
        ("generate --te", ["--temp"]),
        ("launch co", ["codex"]),
        ("generate --model or", ["org/Tiny-4bit", "org/small"]),
        ("generate --model Ti", ["Tiny-4bit"]),
        ("generate --model other/", []),
        ("run org/T", ["org/Tiny-4bit"]),
        ("serve org/T", ["org/Tiny-4bit"]),
        ("bench speed --drafter sm", ["small"]),
        ("convert sm", ["small"]),
    ],
)
def test_the_shell_completes(typed: str, expected: list[str], tmp_path: Path) -> None:
    for name in ("org--Tiny-4bit", "org--small"):
        snapshot = tmp_path / f"hub/models--{name}/snapshots/0123"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
    (tmp_path / "hub/models--org--empty/snapshots").mkdir(parents=True)
    words = f"redrafter-mlx {typed}"
    completed = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mlx_redrafter"],
        env={
            **os.environ,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HOME": str(tmp_path),
            "_REDRAFTER_MLX_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert completed.stdout.split() == expected
    assert "huggingface_hub.hf_api" not in completed.stderr  # takes 0.2 s


def test_the_shell_completes_every_name_of_a_model() -> None:
    for names in _commands()[1:]:
        command: Any = get_command(app)
        for name in names:
            command = command.commands[name]
        for one in command.params:
            if {"--model", "--drafter"} & {*one.opts} or one.metavar == "MODEL":
                assert one._custom_shell_complete is not None, (names, one.name)
