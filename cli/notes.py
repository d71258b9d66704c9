"""Lines on stderr about the work, which ``redrafter-mlx --quiet COMMAND`` leaves out."""

from __future__ import annotations

import logging
import sys

import typer

_is_quiet = False


def set_quiet(is_quiet: bool) -> None:
    """Leave out notes, and the package's log but its errors."""
    global _is_quiet
    _is_quiet = is_quiet
    if is_quiet:
        logging.getLogger("mlx_redrafter").setLevel(logging.ERROR)


def note(line: str) -> None:
    """Print a line to stderr."""
    if not _is_quiet:
        typer.echo(line, err=True)


def is_talkative() -> bool:
    """Return whether a user looks at stderr and wants notes there."""
    return sys.stderr.isatty() and not _is_quiet
