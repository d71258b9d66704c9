"""The application ``redrafter-mlx``: its commands, and the form of its errors.

Text and JSON go to stdout; statistics, progress and errors go to stderr. An error is one line and
exit code 1, a usage error one line and exit code 2, Ctrl-C exit code 130.
"""

import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import typer

from mlx_redrafter import interrupts
from mlx_redrafter.cli.advise import advise
from mlx_redrafter.cli.bench import app as bench
from mlx_redrafter.cli.chat import chat
from mlx_redrafter.cli.check import check
from mlx_redrafter.cli.convert import convert
from mlx_redrafter.cli.generate import generate
from mlx_redrafter.cli.launch import launch
from mlx_redrafter.cli.machines import RANK, join_machines, leave_machines
from mlx_redrafter.cli.models import list_models, pull, remove, show_model
from mlx_redrafter.cli.progress import set_quiet
from mlx_redrafter.cli.run import run_model
from mlx_redrafter.cli.serve import serve
from mlx_redrafter.cli.train import train
from mlx_redrafter.cli.try_out import try_out
from mlx_redrafter.cli.typer_app import Application
from mlx_redrafter.errors import ConfigError, RedrafterError, explain, one_line
from mlx_redrafter.version import __version__

app = Application(
    name="redrafter-mlx",
    help="Faster text from MLX language models by speculative decoding, with unchanged output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("try")(try_out)
app.command("run")(run_model)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(launch)
app.command()(check)
app.command()(advise)
app.command()(train)
app.command()(convert)
app.command("list")(list_models)
app.command("ls", hidden=True)(list_models)
app.command("show")(show_model)
app.command()(pull)
app.command("rm")(remove)
app.add_typer(bench, name="bench")


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(self.format(record), err=True)


def run() -> None:
    """Run ``redrafter-mlx`` with the arguments of the process, and exit."""
    # Python has no object for a stream that the shell closed, as in `generate ... >&-`.
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    # Bytes that are no text are an error of their prompt alone, and encodings may lack signs.
    escapes = {"surrogateescape": [sys.stdin], "backslashreplace": [sys.stdout, sys.stderr]}
    for errors, streams in escapes.items():
        for stream in streams:
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=errors)
    # The library transformers would import torch for seconds; nothing here needs it.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    try:
        interrupts.watch(is_alone=RANK not in os.environ)
        code = main(sys.argv[1:])
        leave_machines(code)
    except KeyboardInterrupt:  # before the command or after it
        code = interrupts.CODE
    except SystemExit as end:  # of a shell that completes a line
        code = int(end.code or 0)
    interrupts.leave(code)


def main(arguments: Sequence[str]) -> int:
    is_debugged = "--debug" in arguments[:1]
    logger = logging.getLogger("mlx_redrafter")
    logger.setLevel(logging.INFO)
    logger.handlers = [_StderrHandler()]
    # A download that fails is one line, without a line for each retry.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    # The error for a prompt that is too long says all.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    try:
        join_machines(arguments)
        result = app(args=list(arguments), prog_name="redrafter-mlx", standalone_mode=False)
    except (RedrafterError, typer.TyperException) as error:
        if is_debugged:
            raise
        return _report(error)
    except KeyboardInterrupt:
        result = interrupts.CODE
    except BrokenPipeError:  # the reader of stdout, such as `head`, has ended
        _silence_stdout()
        return 1
    except OSError as error:
        if is_debugged:
            raise
        if error.filename is None:  # stdout failed, and Python flushes it again at exit
            _silence_stdout()
        return _report(error)
    if result == interrupts.CODE:  # typer makes an exit of Ctrl-C
        beginning = "\n" if sys.stderr.isatty() else ""  # the terminal has written ^C
        typer.echo(beginning + interrupts.last_line(), err=True)
    return result if isinstance(result, int) else 0


def _silence_stdout() -> None:
    with suppress(io.UnsupportedOperation):  # stdout is not a file, as in a test
        stdout = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)


def _report(error: Exception) -> int:
    if isinstance(error, typer.TyperException):
        message, code = error.format_message(), error.exit_code
        if message.startswith("No such command") and "Did you mean" not in message:
            message += " redrafter-mlx --help lists all."
    elif isinstance(error, OSError):
        message, code = explain(error), 1
        if error.strerror is not None:
            message = f"{error.filename2 or error.filename or 'output'}: {message}"
    else:
        message, code = str(error), 2 if isinstance(error, ConfigError) else 1
    if message:  # empty after the help that a call without arguments prints
        typer.echo(f"error: {one_line(message)}", err=True)
    return code


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    debug: bool = typer.Option(
        False, "--debug", help="Show the traceback of an error: redrafter-mlx --debug COMMAND."
    ),
    quiet: bool = typer.Option(
        False, "--quiet", help="Print no notes and no statistics: redrafter-mlx --quiet COMMAND."
    ),
) -> None:
    set_quiet(quiet)
    if version:
        typer.echo(__version__)
        raise typer.Exit
