"""Commands of `redrafter-mlx bench` and of the laboratory, run in this process."""

import io
from contextlib import redirect_stderr, redirect_stdout, suppress

import typer
from typer.testing import CliRunner

from mlx_redrafter.bench.lab.__main__ import call
from mlx_redrafter.cli.bench import app


def run(*arguments: object) -> str:
    """Run a command of `redrafter-mlx bench` and return its output."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code in (0, 1), result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def run_lab(*arguments: object) -> str:
    """Run a command of the laboratory and return its output; exit code 1 is no error."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output), suppress(typer.Exit):
        call([str(argument) for argument in arguments])
    return output.getvalue()
