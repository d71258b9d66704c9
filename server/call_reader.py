"""Reads the calls that a grammar holds, piece by piece, as JSON.

The text is that of the grammar to the letter, so that a string may contain any tag of the format:
only the text that the grammar puts after a string ends it.
"""

import json
import re
import uuid
from collections.abc import Generator
from string import Template
from typing import Any, NamedTuple

from mlx_redrafter.server.call_formats import CallFormat
from mlx_redrafter.server.fields import to_text
from mlx_redrafter.server.tools import Tools

# Beginning of a string in XML's own quotes.
_CDATA = "<![CDATA["
# Patterns of the values in texts of a format.
_VALUES = {"name": r"[\w-]+", "number": r"\d+", "key": r"[^\s<>\"'=]+", "type": r"\w+"}

# Receives the characters of a text, one by one.
_Reading = Generator[None, str, None]
_Finding = Generator[None, str, re.Match[str]]


class ToolCall(NamedTuple):
    """A call of a tool, or a piece of one: pieces of the same call have the same id.

    ``arguments`` is an object as JSON, or the next piece of it.
    """

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any] | None:
        """Its arguments; None if the end of the text has cut them, or JSON has no such number."""
        try:
            found: dict[str, Any] = json.loads(self.arguments)
            to_text(found)
        except (ValueError, RecursionError):
            return None
        return found


def add_call(calls: list[ToolCall], added: ToolCall) -> None:
    """Add a call to others, or the next piece of the last one."""
    if calls and calls[-1].id == added.id:
        added = added._replace(arguments=calls.pop().arguments + added.arguments)
    calls.append(added)


def new_id(chosen: str, known: set[str]) -> str:
    """Return the id of a call that the model has chosen, if it is not known, or another one."""
    call_id = chosen if chosen and chosen not in known else f"call_{uuid.uuid4().hex}"
    known.add(call_id)
    return call_id


class CallReader:
    """Reads the calls between two markers.

    While ``is_in_value``, the next character belongs to a value, in which no marker counts.
    """

    def __init__(self, form: CallFormat, tools: Tools):
        self.is_in_value = self.is_open = False
        self._form = form
        self._properties = {
            one["name"]: (one.get("parameters") or {}).get("properties", {})
            for one in tools.callable
        }
        opening = "{" if form.quote else ""
        self._head = re.compile(_search(form.head + opening))
        # The call that is read, without arguments, and the ids so far.
        self._call, self._ids = ToolCall("", "", ""), set[str]()
        # JSON that the newest character adds, and that the end of the call will add.
        self._added, self._closing = "", ""
        self._reading = self._read()
        next(self._reading)

    def add(self, character: str) -> ToolCall | None:
        """Read a character; return the piece of a call that it adds, the first one without any."""
        before = self._call
        self._reading.send(character)
        return self._take() if self._added or self._call is not before else None

    def end(self) -> ToolCall | None:
        """End the calls at their last marker; return the piece that it adds."""
        self._added, self._closing = self._closing, ""
        self._reading, self.is_open = self._read(), False
        next(self._reading)
        return self._take() if self._added else None

    def _take(self) -> ToolCall:
        added, self._added = self._added, ""
        return self._call._replace(arguments=added)

    def _read(self) -> _Reading:
        while True:
            match = yield from self._find(self._head)
            chosen = Template(self._form.call_id).substitute(match.groupdict())
            call_id = new_id(chosen, self._ids)
            self._call, self.is_open = ToolCall(call_id, match["name"], ""), True
            if self._form.quote:
                yield from self._read_quoted()
            elif self._form.before:
                yield from self._read_keyed(self._properties[match["name"]])
            else:
                yield from self._read_json()
            self.is_open = False

    def _find(self, pattern: re.Pattern[str], seen: str = "") -> _Finding:
        while (match := pattern.search(seen)) is None:
            seen += yield
        return match

    def _read_keyed(self, properties: dict[str, Any]) -> _Reading:
        """Read arguments that stand one after the other."""
        form = self._form
        tail = re.escape(form.tail) if form.tail else "(?!)"  # if empty, a marker ends the call
        pattern = re.compile(f"{_search(form.before)}|(?P<tail>{tail})")
        opening, self._closing, seen = "{", "{}", ""
        while True:
            match = yield from self._find(pattern, seen)
            if match["tail"]:
                self._added, self._closing = self._closing, ""
                return
            key, seen = match["key"], ""
            self._added = f"{opening}{_quote(key)}: "
            opening, self._closing = ", ", "}"
            if form.is_bare(properties[key]):
                yield from self._read_text(form.after, form.has_cdata)
            else:
                seen = yield from self._read_json("<" if form.after else ",)")

    def _read_json(self, stops: str = "") -> Generator[None, str, str]:
        """Read JSON up to one of some characters outside of it; return that.

        Without such characters, read an object.
        """
        depth, is_quoted, is_escaped = 0, False, False
        self.is_in_value = True
        while True:
            character = yield
            if is_quoted:
                is_quoted = is_escaped or character != '"'
                is_escaped = character == "\\" and not is_escaped
            elif not depth and character in stops:
                self.is_in_value = False
                return character
            else:
                is_quoted = character == '"'
                depth += (character in "{[") - (character in "}]")
            if is_quoted or depth or not character.isspace():
                self._added += character
            if not stops and not depth and character == "}":
                self.is_in_value = False
                return ""

    def _read_quoted(self) -> _Reading:
        """Read an object after its brace, with bare keys and texts around strings."""
        self._added, self.is_in_value = "{", True
        quote, stack = self._form.quote, "{"
        key: str | None = ""
        while stack:
            character = yield
            if key is not None and character == ":":
                self._added += f"{_quote(key.replace(quote, ''))}: "
                key = None
            elif key is not None and character != "}":
                key += character
            elif character == quote[0]:
                for _ in quote[1:]:
                    yield
                yield from self._read_text(quote)
                self.is_in_value = True
            else:
                self._added += character
                if character in "}]":
                    stack = stack[:-1]
                elif character in "{[":
                    stack += character
                key = "" if character in "{," and stack[-1] == "{" else None
        self.is_in_value = False

    def _read_text(self, end: str, has_cdata: bool = False) -> _Reading:
        """Read a string without quotes, and the first text that ends it."""
        self._added, self.is_in_value, held = self._added + '"', True, ""
        while has_cdata and _CDATA.startswith(held):
            held += yield
            if held == _CDATA:
                held, end, has_cdata = "", f"]]>{end}", False
        while not held.endswith(end):
            # The beginning of the end, if it is one, waits for the rest.
            kept = max(size for size in range(len(end)) if held.endswith(end[:size]))
            ready, held = held[: len(held) - kept], held[len(held) - kept :]
            self._added += _quote(ready)[1:-1]
            held += yield
        self._added += f'{_quote(held[: -len(end)])[1:-1]}"'
        self.is_in_value = False


def _search(text: str) -> str:
    """Return a pattern that finds a text of a format."""
    pattern = re.escape(text)
    for name, values in _VALUES.items():
        pattern = pattern.replace(re.escape(f"${name}"), f"(?P<{name}>{values})")
    return pattern


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
