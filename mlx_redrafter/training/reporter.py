"""The interface through which a training run reports to its caller."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receiver of progress and messages; a KeyboardInterrupt from `progress` stops the run."""

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """Report that ``done`` of ``total`` tokens or steps of a stage are done."""
        ...

    def say(self, message: str) -> None:
        """Report a message of one line."""
        ...
