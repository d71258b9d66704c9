"""Tools of a chat, read from OpenAI's definitions, and the calls that a request allows."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_redrafter.server.fields import Fields, shortened
from mlx_redrafter.server.refusals import Refusal

logger = logging.getLogger(__name__)

MAX_TOOLS = 128


@dataclass(frozen=True)
class Tools:
    """At most `MAX_TOOLS` tools that a model sees, and the calls that it may make.

    Attributes:
        definitions: Tools in OpenAI's format, for the chat template, with names of their own.
        names: Names of the tools that may be called; None for all.
        is_required: Whether the answer must be a call.
        is_parallel: Whether an answer may have several calls.
    """

    definitions: list[dict[str, Any]]
    names: tuple[str, ...] | None = None
    is_required: bool = False
    is_parallel: bool = True

    def __post_init__(self) -> None:
        if len(self.definitions) > MAX_TOOLS:
            count = len(self.definitions)
            raise Refusal(f"tools must be at most {MAX_TOOLS}, got {count}", "tools")
        known = Counter(one["function"]["name"] for one in self.definitions)
        for name, count in known.most_common(1):
            if count > 1:
                raise Refusal(f"tools must have names of their own, got {name!r} twice", "tools")

    @property
    def callable(self) -> list[dict[str, Any]]:
        functions = [one["function"] for one in self.definitions]
        names = self.names
        return functions if names is None else [one for one in functions if one["name"] in names]

    def choose(
        self, choice: str, names: Sequence[str] | None = None, is_single: bool = False
    ) -> Tools:
        """Return these tools with a choice of the request: "auto", "none" or "required".

        ``names`` are those of the tools that may be called, None for all. If ``is_single``, there
        is at most one call. Refuse names of no tool, and a call that is required without tools.
        """
        known = [one["function"]["name"] for one in self.definitions]
        for name in names or ():
            if name not in known:
                listed = ", ".join(known[:10]) or "none"
                raise Refusal(
                    f"tool_choice names {name!r}, but the tools are {listed}", "tool_choice"
                )
        chosen = None if names is None else tuple(names)
        is_required = choice == "required"
        if is_required and not (known if chosen is None else chosen):
            raise Refusal("tool_choice needs tools; give at least one", "tool_choice")
        if choice == "none" or chosen == ():
            return Tools([])
        return replace(self, names=chosen, is_required=is_required, is_parallel=not is_single)


def read_tool(fields: Fields, schema: str = "parameters") -> dict[str, Any]:
    """Read a tool, with the JSON schema of its arguments in a field; return OpenAI's definition.

    With ``strict``, a schema that cannot be enforced as a whole is refused.
    """
    function: dict[str, Any] = {
        "name": fields.word("name"),
        "description": fields.typed("description", str),
        "parameters": fields.typed(schema, dict),
        "strict": fields.typed("strict", bool) or None,
    }
    function = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": function}


def read_tools(
    fields: Fields,
    kinds: tuple[str | None, ...],
    left_out: tuple[str, ...],
    schema: str = "parameters",
) -> list[dict[str, Any]]:
    """Return the definitions of the tools of a request, without those that run at its provider.

    ``kinds`` are the types of tools that the client runs, None for tools without a type;
    ``left_out`` are the beginnings of types that the model is not shown. ``schema`` is as in
    `read_tool`.
    """
    definitions, others = list[dict[str, Any]](), list[str]()
    for tool in fields.each("tools"):
        found = tool.typed("type", str)
        if found is not None and found.startswith(left_out):
            others.append(found)
            continue
        if found not in kinds:
            raise tool.refusal("type", json.dumps(kinds[0]), found)
        definitions.append(read_tool(tool, schema))
    if others:
        named = shortened(", ".join(dict.fromkeys(others)))
        logger.info("left out %d tools of the types %r", len(others), named)
    return definitions
