"""The fields of a JSON object from a client: each is read once and checked."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from typing import Any, TypeVar

from mlx_redrafter.checks import is_number
from mlx_redrafter.server.refusals import Refusal

Value = TypeVar("Value")

# Maximum number of characters of a client's text that an error message repeats.
MAX_SHOWN = 200

_NAMES = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}


class Fields:
    """The fields of an object; a field that is null counts as left out, as with OpenAI.

    Args:
        values: The object.
        within: Path of the object in the request, for messages.

    Raises:
        Refusal: The value is not an object.
    """

    def __init__(self, values: object, within: str = ""):
        if not isinstance(values, dict):
            found = reprlib.repr(values)
            raise Refusal(f"{within or 'the body'} must be an object, got {found}", within or None)
        self._left = {name: value for name, value in values.items() if value is not None}
        self._prefix = f"{within}." if within else ""

    def take(self, name: str) -> Any:
        """Return the value of a field; None if it is left out."""
        return self._left.pop(name, None)

    def typed(self, name: str, kind: type[Value]) -> Value | None:
        """Return the value of a field of one JSON type; None if it is left out.

        Raises:
            Refusal: The value has another type.
        """
        value = self.take(name)
        if value is not None and not isinstance(value, kind):
            raise self.refusal(name, _NAMES[kind], value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer field; None if it is left out.

        Raises:
            Refusal: The value is not an integer, or out of range.
        """
        value = self.take(name)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise self.refusal(name, f"an integer from {low} to {high}", value)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a number field; None if it is left out.

        Raises:
            Refusal: The value is not a number, or out of range.
        """
        value = self.take(name)
        if value is not None and not (is_number(value) and low <= value <= high):
            raise self.refusal(name, f"a number from {low:g} to {high:g}", value)
        return value

    def one_of(self, name: str, choices: Sequence[Any], hint: str = "") -> Any:
        """Return a field that has one of some values; None if it is left out.

        Raises:
            Refusal: The value is a different one.
        """
        value = self.take(name)
        # The types are compared, too, since 1 == True and 0 == 0.0 in Python.
        if value is not None and not any(type(value) is type(c) and value == c for c in choices):
            raise self.refusal(name, " or ".join(map(json.dumps, choices)) + hint, value)
        return value

    def finish(self) -> None:
        """Check that every field was read.

        Raises:
            Refusal: A field was not read, so it is not supported.
        """
        for name in self._left:
            shown = self._prefix + shortened(name)
            raise Refusal(
                f"{shown} is not supported; leave it out", shown, code="unknown_parameter"
            )

    def refusal(self, name: str, expected: str, value: object) -> Refusal:
        """Create the error for a field with an unexpected value."""
        return unexpected(self._prefix + name, expected, value)


def unexpected(name: str, expected: str, value: object) -> Refusal:
    """Create the error for an unexpected value."""
    return Refusal(f"{name} must be {expected}, got {reprlib.repr(value)}", name)


def shortened(text: str) -> str:
    """Shorten a text to fit in a message."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def parse_json(body: bytes) -> Any:
    """Parse a body as JSON, without the infinities that Python's parser accepts.

    Raises:
        Refusal: The body is not JSON.
    """
    try:
        return json.loads(body, parse_constant=_refuse_constant, parse_float=_parse_finite)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body must be JSON: {shortened(str(error))}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large")
    return value
