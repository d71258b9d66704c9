"""Progress of ``redrafter-mlx train``, and its interruption."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

# Seconds between lines about progress if stderr is not a terminal.
LOG_SECONDS = 20.0


class Interrupts:
    """Memory of Ctrl-C until a step is finished; the second one stops at once."""

    def __init__(self) -> None:
        self.happened = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.happened:
            raise KeyboardInterrupt
        self.happened = True
        typer.echo("stopping after this step; Ctrl-C again stops at once", err=True)

    def check(self) -> None:
        """Stop if Ctrl-C was pressed."""
        if self.happened:
            raise KeyboardInterrupt


class ConsoleReporter:
    """A reporter that shows progress with the time left on a terminal, and messages."""

    def __init__(self, interrupts: Interrupts):
        from mlx_redrafter.cli.progress import progress_bar

        self.interrupts = interrupts
        self.bar = progress_bar("{task.description}")
        self.tasks: dict[str, Any] = {}
        self.said_at = time.monotonic()
        self.bar.start()

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """See `mlx_redrafter.training.Reporter`."""
        self.interrupts.check()
        if self.bar.disable:
            self._say_now_and_then(stage, done, total)
        if stage not in self.tasks:
            self.tasks[stage] = self.bar.add_task(stage, total=total)
        self.bar.update(self.tasks[stage], completed=done, total=total)

    def _say_now_and_then(self, stage: str, done: int, total: int | None) -> None:
        if time.monotonic() - self.said_at < LOG_SECONDS and done != total:
            return
        self.said_at = time.monotonic()
        self.say(f"{stage}: {done:,}" + ("" if total is None else f" of {total:,}"))

    def say(self, message: str) -> None:
        """See `mlx_redrafter.training.Reporter`."""
        self.bar.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bars away."""
        self.bar.stop()


@contextmanager
def console_reporter() -> Iterator[ConsoleReporter]:
    """A reporter on stderr, ended by Ctrl-C once a step is finished."""
    interrupts = Interrupts()
    reporter = ConsoleReporter(interrupts)
    before = signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield reporter
    finally:
        reporter.close()
        signal.signal(signal.SIGINT, before)
