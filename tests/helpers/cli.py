"""Running the command line in this process."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from mlx_redrafter.cli.main import main


class Result(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> Result:
    """Run ``redrafter-mlx`` with these arguments."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return Result(code, out, err)
