"""Running the command line in this process, and Python in another one."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import typer.main

from mlx_redrafter.cli.main import app, main

# Arguments of Python that run the program in a process of its own.
PROGRAM = ("-m", "mlx_redrafter")

# Typer builds all commands anew for every call, 20 ms that a program spends once.
typer.main.get_command = cache(typer.main.get_command)


def commands(command: Any = None, name: str = "") -> dict[str, Any]:
    """Commands and groups of commands by the words that call them, the program itself by none."""
    command = command or typer.main.get_command(app)
    found = {name: command}
    for word, one in getattr(command, "commands", {}).items():
        found |= commands(one, f"{name} {word}".strip())
    return found


class Result(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    def done(self) -> "Result":
        """This, of a command that must have done its work."""
        assert self.code == 0, self.err
        return self


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> Result:
    """Run ``redrafter-mlx`` with these arguments."""
    capsys.readouterr()
    with mock.patch("signal.signal"):  # pytest ends by a signal as before
        code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return Result(code, out, err)


def python(*words: object, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run Python in a process of its own."""
    command, how = [sys.executable, *map(str, words)], {"text": True, "timeout": 300, **options}
    return subprocess.run(command, capture_output=True, **how)


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """`run` for tests that need no captured output of their own."""
    return partial(run, capsys)
