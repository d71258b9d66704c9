"""Notes about the work on stderr, and its progress if that is a terminal."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mlx_redrafter.errors import one_line

_is_quiet = False


def set_quiet(is_quiet: bool) -> None:
    """Leave out notes, and the package's log but its errors, as ``--quiet`` asks."""
    global _is_quiet
    _is_quiet = is_quiet
    if is_quiet:
        logging.getLogger("mlx_redrafter").setLevel(logging.ERROR)


def note(line: str) -> None:
    """Print a line to stderr; names and reasons in it may come from a downloaded file."""
    if not _is_quiet:
        typer.echo(one_line(line), err=True)


def is_talkative() -> bool:
    """Return whether a user looks at stderr and wants notes there."""
    return sys.stderr.isatty() and not _is_quiet


class _Bar(Progress):
    """A progress bar whose thread has ended when it is stopped.

    A thread that still writes at the end of the interpreter would abort it.
    """

    def stop(self) -> None:
        thread = self.live._refresh_thread
        super().stop()
        if thread is not None:
            thread.join()


def progress_bar(label: str) -> Progress:
    """Create a progress bar with the time left, on stderr; hidden if that is not a terminal."""
    return _Bar(
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


@contextmanager
def prefill_progress() -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback that shows the prompt tokens processed, or None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    progress = progress_bar("Prompt")
    task = progress.add_task("prompt")

    def update(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)
        if done >= total:
            progress.stop()  # before the text appears
        elif done > 0:
            progress.start()  # a prompt of one chunk needs no bar

    try:
        yield update
    finally:
        progress.stop()
