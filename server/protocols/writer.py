"""The writers of replies: each formats the parts of a reply for one protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.refusals import Refusal


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens of one reply.

    Attributes:
        num_prompt: Tokens of the prompts.
        num_cached: Prompt tokens found in a cache.
        num_tokens: Tokens generated.
        num_reasoning: Tokens of thinking among them.
        num_accepted: Accepted drafts among them.
        num_drafts: Drafts verified.
    """

    num_prompt: int
    num_cached: int
    num_tokens: int = 0
    num_reasoning: int = 0
    num_accepted: int = 0
    num_drafts: int = 0


class Writer(ABC):
    """Formats one reply, as events or as one object.

    Args:
        model: Name of the model that the reply shows.

    Attributes:
        media_type: Media type of a stream of events.
        usage: Function that returns the numbers of the reply so far; the reply sets it.
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
