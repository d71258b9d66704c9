"""A text on stdout while it is generated; on a terminal, with its speed below."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

import mlx_redrafter

ShowDrafts = Annotated[bool, "Colour the accepted drafts, if stdout is a terminal."]
# Seconds between two updates of the unfinished line and the speed.
REFRESH = 0.1
# Characters that move the cursor or change the terminal, except newline and tab.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@contextmanager
def live_text(shows_drafts: bool) -> Iterator[Callable[[mlx_redrafter.GenerationResponse], None]]:
    """Yield a function that prints the text of responses; on a terminal it may colour drafts."""
    console = Console(highlight=False)
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        yield print_text
        return
    text = LiveText(console, shows_drafts)
    try:
        yield text.add
    finally:
        text.finish()


def print_text(response: mlx_redrafter.GenerationResponse) -> None:
    """Print the text of the next token at once; on a terminal, without control characters."""
    sys.stdout.write(_harmless(response.text) if sys.stdout.isatty() else response.text)
    sys.stdout.flush()


def _harmless(text: str) -> str:
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class LiveText:
    """A text on a terminal: finished lines stay, and the last one is drawn above its speed."""

    def __init__(self, console: Console, shows_drafts: bool):
        self._console = console
        self._style = "green" if shows_drafts else ""
        self._line = Text()
        self._num_drafted = 0
        self._speed = ""
        self._refreshed = 0.0
        self._live = Live(
            console=console, auto_refresh=False, transient=True, get_renderable=self._render
        )

    def add(self, response: mlx_redrafter.GenerationResponse) -> None:
        self._live.start()
        self._num_drafted += response.from_draft
        self._speed = ", ".join(self._counts(response))
        *finished, rest = _harmless(response.text).split("\n")
        style = self._style if response.from_draft else ""
        for piece in finished:
            line, self._line = self._line.append(piece, style), Text()
            self._console.print(line, soft_wrap=True)
        self._line.append(rest, style)
        if finished or time.monotonic() - self._refreshed > REFRESH:
            self._live.refresh()
            self._refreshed = time.monotonic()

    def finish(self) -> None:
        """Erase the speed, and leave the unfinished line."""
        self._live.stop()
        self._console.print(self._line, soft_wrap=True, end="")

    def _render(self) -> Group:
        # rich can only redraw what fits on the screen.
        room = self._console.width * max(1, self._console.height - 3)
        line = self._line if len(self._line) <= room else self._line[-room:]
        return Group(line, Text(self._speed, "dim"))

    def _counts(self, response: mlx_redrafter.GenerationResponse) -> Iterator[str]:
        if response.generation_tokens > 1:  # the first token belongs to the prompt's time
            yield f"{response.generation_tps:.1f} tokens/s"
        if response.tokens_per_step is not None:
            yield f"{response.tokens_per_step:.2f} tokens/step"
        yield f"{self._num_drafted / response.generation_tokens:.0%} drafted"
