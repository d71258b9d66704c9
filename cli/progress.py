"""Progress of long work, on stderr if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class _Bar(Progress):
    """A progress bar whose thread has ended when it is stopped.

    A thread that still writes at the end of the interpreter would abort it.
    """

    def stop(self) -> None:
        """Stop, and wait for the thread that refreshes."""
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
