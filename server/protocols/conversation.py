"""The messages of a chat, built from blocks or items, in the form that chat templates expect.

Templates want one system message at the beginning, and turns that alternate. So system texts at the
beginning become one message, later ones a user's text, and texts of one role in a row one message.
"""

import json
from collections import defaultdict
from typing import Any

from mlx_redrafter.server.refusals import Refusal

ROLES = ("user", "assistant", "system", "developer")
# Text between two texts that become one message.
BREAK = "\n\n"
# Fields of a message that are texts.
_TEXTS = ("content", "reasoning_content")


def read_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call; what is no object, such as cut ones, is shown as an argument.

    So an agent may go on after such a call, and tell the model what was wrong.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


class Conversation:
    """Messages in OpenAI's format, with the arguments of calls as objects."""

    def __init__(self) -> None:
        # Messages whose texts are lists of pieces: to add up many texts would take minutes.
        self._messages: list[dict[str, Any]] = []
        # Names of the tools by the ids of their calls.
        self._calls: dict[str, str] = {}
        # Ids of the calls without a result, in their order, by the name of the tool; all for None.
        self._waiting: defaultdict[str | None, dict[str, None]] = defaultdict(dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [
            {name: "".join(one) if name in _TEXTS else one for name, one in message.items()}
            for message in self._messages
        ]

    def add_text(self, role: str, text: str) -> None:
        """Add a text of the "user" or the "assistant", or instructions: "system", "developer"."""
        if role == "assistant":
            self._assistant()["content"].append(text)
            return
        if role != "user":
            is_first = all(message["role"] == "system" for message in self._messages)
            role = "system" if is_first else "user"
        if self._messages and self._messages[-1]["role"] == role:
            self._messages[-1]["content"] += (BREAK, text)
        else:
            self._messages.append({"role": role, "content": [text]})

    def add_reasoning(self, text: str) -> None:
        self._assistant().setdefault("reasoning_content", []).append(text)

    def add_call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        self._calls[call_id] = name
        self._waiting[None][call_id] = self._waiting[name][call_id] = None
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, text: str, param: str) -> None:
        """Add the result of a call; refuse one if no call before it has this id."""
        if call_id not in self._calls:
            raise Refusal(
                f"{param} must be the id of a call before it, got {call_id[:100]!r}", param
            )
        name = self._calls[call_id]
        self._waiting[None].pop(call_id, None)
        self._waiting[name].pop(call_id, None)
        result = {"role": "tool", "tool_call_id": call_id, "name": name, "content": [text]}
        self._messages.append(result)

    def add_result_of(self, name: str | None, text: str) -> None:
        """Add the result of the call with an id, or of the oldest call of a tool with that name.

        Calls that have a result do not count. If there is no such call, the oldest one has it.
        """
        name, waiting = name or "", self._waiting[None]
        found = name if name in waiting else next(iter(self._waiting[name] or waiting), name)
        self._calls.setdefault(found, name)
        self.add_result(found, text, "tool_name")

    def _assistant(self) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": []})
        return self._messages[-1]
