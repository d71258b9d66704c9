"""Responses that clients may continue or fetch, kept in memory until others need the room."""

import json
from collections import OrderedDict
from typing import Any

from mlx_redrafter.server.fields import to_text
from mlx_redrafter.server.refusals import Refusal

# Maximum total size of the kept responses, in characters of JSON.
MAX_CHARACTERS = 1 << 26


class StoredResponses:
    """Responses by their ids; only the event loop's thread changes them.

    For an id of a response that was not stored, or was forgotten, methods raise `Refusal`.
    """

    def __init__(self) -> None:
        self._total = 0
        # Responses and the items of their conversations, as JSON.
        self._kept: OrderedDict[str, str] = OrderedDict()

    def keep(self, response: dict[str, Any], items: list[Any]) -> None:
        """Keep a response as it was sent, and the items of its conversation with its output."""
        text = self._kept[response["id"]] = to_text({"response": response, "items": items})
        self._total += len(text)
        while self._total > MAX_CHARACTERS:
            self._total -= len(self._kept.popitem(last=False)[1])

    def find(self, response_id: str, param: str) -> tuple[dict[str, Any], list[Any]]:
        found = json.loads(self._text_of(response_id, param))
        return found["response"], found["items"]

    def forget(self, response_id: str, param: str) -> None:
        self._total -= len(self._text_of(response_id, param))
        del self._kept[response_id]

    def _text_of(self, response_id: str, param: str) -> str:
        text = self._kept.get(response_id)
        if text is None:
            is_path = param == "id"  # OpenAI answers a field of a body with status 400
            raise Refusal(
                f"{param} must be the id of a stored response, got {response_id[:100]!r}; send "
                "the whole conversation as input",
                param,
                status=404 if is_path else 400,
                code="previous_response_not_found",
            )
        return text
