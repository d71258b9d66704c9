"""Responses that clients may continue or fetch, kept in memory until others need the room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from mlx_redrafter.server.refusals import Refusal
from mlx_redrafter.server.wire import to_text

# Maximum total size of the kept responses, in characters of JSON.
MAX_CHARACTERS = 1 << 26


class StoredResponse(NamedTuple):
    """One response.

    Attributes:
        response: The response as it was sent.
        items: Items of the conversation, the response's output included.
    """

    response: dict[str, Any]
    items: list[Any]


class StoredResponses:
    """Responses by their ids; any thread may use them.

    Args:
        max_characters: Maximum total size, in characters of JSON.
    """

    def __init__(self, max_characters: int = MAX_CHARACTERS):
        self._max = max_characters
        self._total = 0
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._changing = threading.Lock()

    def keep(self, response: dict[str, Any], items: list[Any]) -> None:
        """Keep a response; forget the oldest ones if there is no room."""
        size = len(to_text({"response": response, "items": items}))
        with self._changing:
            self._kept[response["id"]] = StoredResponse(response, items), size
            self._total += size
            while self._total > self._max:
                _, (_, freed) = self._kept.popitem(last=False)
                self._total -= freed

    def find(self, response_id: str, param: str) -> StoredResponse:
        """Find a response.

        Raises:
            Refusal: It was not stored, or was forgotten.
        """
        with self._changing:
            found = self._kept.get(response_id)
        if found is None:
            raise Refusal(
                f"{param} must be the id of a stored response, got {response_id[:100]!r}; send "
                "the whole conversation as input",
                param,
                status=404,
                code="previous_response_not_found",
            )
        return found[0]

    def forget(self, response_id: str, param: str) -> None:
        """Forget a response.

        Raises:
            Refusal: It was not stored, or was forgotten before.
        """
        self.find(response_id, param)
        with self._changing:
            _, size = self._kept.pop(response_id, (None, 0))
            self._total -= size
