"""The writers of replies: each formats the parts of a reply for one protocol."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from mlx_redrafter.server.call_reader import ToolCall
from mlx_redrafter.server.fields import event
from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.refusals import Refusal


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens of one reply, and the time that they took.

    Attributes:
        num_cached: Prompt tokens found in a cache.
        num_tokens: Tokens generated, of which ``num_reasoning`` are thinking.
        num_drafts: Drafts verified, of which ``num_accepted`` were accepted.
        load_seconds: Seconds in which the model was loaded, unless it was, and the prompts encoded.
        prompt_seconds: Seconds from then to the first token.
        text_seconds: Seconds from the first token to the last one.
    """

    num_prompt: int
    num_cached: int
    num_tokens: int = 0
    num_reasoning: int = 0
    num_accepted: int = 0
    num_drafts: int = 0
    load_seconds: float = 0.0
    prompt_seconds: float = 0.0
    text_seconds: float = 0.0


class Writer(ABC):
    """Formats one reply, as events or as one object.

    ``usage`` returns the numbers of the reply so far; the reply sets it.
    """

    media_type: ClassVar[str] = "text/event-stream"
    usage: Callable[[], Usage]

    def __init__(self, model: str):
        self.model = model

    @abstractmethod
    def add(self, part: Part) -> Iterator[str]:
        """Yield the events of the next part."""

    @abstractmethod
    def end(self) -> Iterator[str]:
        """Yield the events after the last part."""

    @abstractmethod
    def fail(self, refusal: Refusal) -> Iterator[str]:
        """Yield the events that end the stream with an error."""

    @abstractmethod
    def keep_alive(self) -> Iterator[str]:
        """Yield events that say nothing, for clients that give up a silent connection."""

    @abstractmethod
    def whole(self, texts: Sequence[Part]) -> dict[str, Any]:
        """Format a reply in one piece from the parts of each text, added up."""


class BlockWriter(Writer):
    """Writes replies of blocks in a row, as those of Anthropic's messages and OpenAI's responses.

    A block is open until another one begins. Its ``kind`` is "thinking", "text" or "call", or empty
    if none is open. ``last`` is the newest part.
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


class StreamOptions(NamedTuple):
    """Options of a client's stream: the usage at its end, and marks on drafted tokens."""

    shows_usage: bool
    shows_drafts: bool


class ChoiceWriter(Writer):
    """Writes replies of choices under one head, with ``kind`` as its ``object``, as at OpenAI."""

    def __init__(self, prefix: str, kind: str, options: StreamOptions, model: str):
        super().__init__(model)
        self._options = options
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def add(self, part: Part) -> Iterator[str]:
        if self.is_shown(part):
            choice = self.choice(part, "delta")
            if self._options.shows_drafts:
                choice["is_draft"] = part.is_draft
                choice["tokens"], choice["steps"] = part.num_tokens, part.num_steps
            shown = {"usage": None} if self._options.shows_usage else {}
            yield event({**self._head, "choices": [choice], **shown})

    def end(self) -> Iterator[str]:
        if self._options.shows_usage:
            yield event({**self._head, "choices": [], "usage": _format_usage(self.usage())})
        yield "data: [DONE]\n\n"

    def fail(self, refusal: Refusal) -> Iterator[str]:
        yield event(refusal.to_json())

    def keep_alive(self) -> Iterator[str]:
        yield ": waiting\n\n"

    def whole(self, texts: Sequence[Part]) -> dict[str, Any]:
        choices = [self.choice(text, "message") for text in texts]
        return {**self._head, "choices": choices, "usage": _format_usage(self.usage())}

    def is_shown(self, part: Part) -> bool:
        """Return whether a stream has a chunk for a part."""
        return bool(part.finish_reason or part.has_content)

    @abstractmethod
    def choice(self, part: Part, name: str) -> dict[str, Any]:
        """Format a whole choice ("message"), or the next part of one ("delta")."""


def _format_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_tokens,
        "total_tokens": usage.num_prompt + usage.num_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning,
            "accepted_prediction_tokens": usage.num_accepted,
            "rejected_prediction_tokens": usage.num_drafts - usage.num_accepted,
        },
    }
