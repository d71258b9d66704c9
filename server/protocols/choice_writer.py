"""The stream that OpenAI's chats and completions have in common: choices under one head."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_redrafter.server.parts import Part
from mlx_redrafter.server.protocols.openai_fields import StreamOptions, format_usage
from mlx_redrafter.server.protocols.writer import Writer
from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.wire import event


class ChoiceWriter(Writer):
    """Writes replies that consist of choices; ``kind`` is the reply's ``object``."""

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
            yield event({**self._head, "choices": [], "usage": format_usage(self.usage())})
        yield "data: [DONE]\n\n"

    def fail(self, refusal: Refusal) -> Iterator[str]:
        yield event(refusal.to_json())

    def keep_alive(self) -> Iterator[str]:
        yield ": waiting\n\n"

    def whole(self, texts: Sequence[Part]) -> dict[str, Any]:
        choices = [self.choice(text, "message") for text in texts]
        return {**self._head, "choices": choices, "usage": format_usage(self.usage())}

    def is_shown(self, part: Part) -> bool:
        """Whether a stream has a chunk for a part."""
        return bool(part.finish_reason or part.has_content)

    @abstractmethod
    def choice(self, part: Part, name: str) -> dict[str, Any]:
        """Format a whole choice ("message"), or the next part of one ("delta")."""
