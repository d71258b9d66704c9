"""The stream that Anthropic's messages and OpenAI's responses have in common: blocks in a row.

Each block is thinking, text or a call; it is open until another one begins.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from mlx_redrafter.server.call_reader import ToolCall
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.protocols.writer import Writer


class BlockWriter(Writer):
    """Writes replies that consist of blocks.

    Args:
        model: Name of the model.

    Attributes:
        kind: Kind of the open block: "thinking", "text" or "call"; empty if none is open.
        last: The newest part.
    """

    def __init__(self, model: str):
        super().__init__(model)
        self.kind = ""
        self.last: Part | None = None
        self._call_id = ""

    def add(self, part: Part) -> Iterator[str]:
        yield from self.begin()
        if part.reasoning:
            yield from self._say("thinking", part.reasoning)
        if part.content:
            yield from self._say("text", part.content)
        for call in part.tool_calls:
            yield from self._say("call", call.arguments, call)
        self.last = part

    def end(self) -> Iterator[str]:
        yield from self.begin()
        yield from self.close()
        yield from self.finish()

    def close(self) -> Iterator[str]:
        """Yield the events that end the open block, if there is one."""
        if self.kind:
            yield from self.close_block()
            self.kind = ""

    def _say(self, kind: str, text: str, call: ToolCall | None = None) -> Iterator[str]:
        """Add to the open block, or begin one if that is another one."""
        call_id = "" if call is None else call.id
        if (self.kind, self._call_id) != (kind, call_id):
            yield from self.close()
            self.kind, self._call_id = kind, call_id
            yield from self.open_block(call)
        if text:
            yield from self.extend(text)

    @abstractmethod
    def begin(self) -> Iterator[str]:
        """Yield the events before the first block, unless they have been sent."""

    @abstractmethod
    def open_block(self, call: ToolCall | None) -> Iterator[str]:
        """Yield the events that begin a block of this kind, with the call of a "call"."""

    @abstractmethod
    def extend(self, text: str) -> Iterator[str]:
        """Yield the events that add a text to the open block."""

    @abstractmethod
    def close_block(self) -> Iterator[str]:
        """Yield the events that end the open block."""

    @abstractmethod
    def finish(self) -> Iterator[str]:
        """Yield the events after the last block."""
