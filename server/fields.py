"""JSON of the server: the fields of a client's objects, each read once and checked, and replies."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from starlette.responses import Response

from mlx_redrafter.checks import is_number, is_one_of
from mlx_redrafter.server.refusals import Refusal

Value = TypeVar("Value")

# Maximum number of characters of a client's text that an error message repeats.
MAX_SHOWN = 200
# Maximum number of digits of an integer; the time to read one grows with their square.
MAX_DIGITS = 1000

# Writes JSON in ASCII characters, which any text can be encoded in.
to_text = json.JSONEncoder(allow_nan=False).encode

_NAMES = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}


class Fields:
    """The fields of an object; a field that is null counts as left out, as with OpenAI.

    Every method that reads a field raises `Refusal` for a value that does not fit, and returns None
    for a field that is left out. ``path`` is the place of the object in the request, for messages,
    and ``shown`` has the names of fields there, where those are others.
    """

    def __init__(self, values: object, path: str = "", shown: Mapping[str, str] | None = None):
        if not isinstance(values, dict):
            found = reprlib.repr(values)
            raise Refusal(f"{path or 'the body'} must be an object, got {found}", path or None)
        self.values: dict[str, Any] = values
        self.path = path
        self._shown = shown or {}
        self._left = {name: value for name, value in values.items() if value is not None}

    def take(self, *names: str) -> Any:
        """Return the value of the last one of some fields that is given."""
        found = [self._left.pop(name, None) for name in names]
        return next((value for value in reversed(found) if value is not None), None)

    def typed(self, name: str, kind: type[Value]) -> Value | None:
        value = self.take(name)
        if value is not None and not isinstance(value, kind):
            raise self.refusal(name, _NAMES[kind], value)
        return value

    def word(self, name: str) -> str:
        value = self.typed(name, str)
        if not value:
            raise self.refusal(name, "a text that is not empty", value)
        return value

    def texts(self, name: str, is_required: bool = False) -> list[str]:
        """Return the texts of a field: one, or a list of texts and blocks; none if left out."""
        value = self.take(name)
        if not isinstance(value, (str, list) if is_required else (str, list, type(None))):
            raise self.refusal(name, "a text or a list of texts", value)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        return [read_text(one, self.path_of(name)) for one in listed]

    def inner(self, name: str) -> Fields:
        """Return the fields of an object; none if it is left out."""
        return Fields(self.typed(name, dict) or {}, self.path_of(name))

    def each(self, name: str) -> list[Fields]:
        """Return the fields of every object of a list; an empty list if it is left out."""
        listed = self.typed(name, list) or []
        return [Fields(one, f"{self.path_of(name)}[{i}]") for i, one in enumerate(listed)]

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise self.refusal(name, f"an integer from {low} to {high}", value)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.take(name)
        if value is not None and not (is_number(value) and low <= value <= high):
            raise self.refusal(name, f"a number from {low:g} to {high:g}", value)
        return value

    def one_of(self, name: str, choices: Sequence[Any], is_required: bool = False) -> Any:
        """Return a field that has one of some values."""
        value = self.take(name)
        if not is_one_of(value, choices) and (is_required or value is not None):
            raise self.refusal(name, " or ".join(map(json.dumps, choices)), value)
        return value

    def finish(self) -> None:
        """Check that every field was read: one that was not is not supported."""
        for name in self._left:
            shown = self.path_of(shortened(name))
            raise Refusal(
                f"{shown} is not supported; leave it out", shown, code="unknown_parameter"
            )

    def refusal(self, name: str, expected: str, value: object) -> Refusal:
        return unexpected(self.path_of(name), expected, value)

    def path_of(self, name: str) -> str:
        """Return the path of a field, as messages name it."""
        name = self._shown.get(name, name)
        return f"{self.path}.{name}" if self.path else name


def read_text(block: object, path: str) -> str:
    """Read a text, or a block that is one; the type of blocks depends on the protocol."""
    if isinstance(block, str):
        return block
    fields = Fields(block, path)
    kind = fields.take("type")
    text = fields.typed("refusal" if kind == "refusal" else "text", str)
    if kind not in ("text", "input_text", "output_text", "refusal") or text is None:
        raise unexpected(path, "text; the model reads neither images nor files", block)
    return text


def unexpected(name: str, expected: str, value: object) -> Refusal:
    return Refusal(f"{name} must be {expected}, got {reprlib.repr(value)}", name)


def shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def parse_json(body: bytes) -> Any:
    """Parse a body as JSON, without the infinities that Python's parser accepts."""
    try:
        return json.loads(
            body, parse_constant=_parse_finite, parse_float=_parse_finite, parse_int=_parse_integer
        )
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body must be JSON: {shortened(str(error))}") from error


def _parse_integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"{text[:20]}... has {len(text)} digits, more than {MAX_DIGITS}")
    return int(text)


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def event(value: dict[str, Any], name: str = "") -> str:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {to_text(value)}\n\n"


def respond(
    value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(to_text(value), status, headers, "application/json")
