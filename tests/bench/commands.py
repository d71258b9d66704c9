"""Commands of `redrafter-mlx bench` and of the laboratory, run in this process."""

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial

import typer

from mlx_redrafter.bench.lab.__main__ import call
from mlx_redrafter.cli.bench import app


def _run(program: Callable[[list[str]], object], *arguments: object) -> str:
    """Run a program and return its output; exit code 1 is no error."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output), suppress(typer.Exit):
        program([str(argument) for argument in arguments])
    return output.getvalue()


run = partial(_run, partial(app, standalone_mode=False))
run_lab = partial(_run, call)
