"""Fields of a JSON object from a client, each read once and checked."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from typing import Any, TypeVar

from mlx_redrafter.checks import is_number
from mlx_redrafter.server.refusals import Refusal

Value = TypeVar("Value")

# Characters of a text from a client that a message repeats.
LONGEST = 200

_NAMES = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}


class Fields:
    """The fields of an object; null stands for none, as with OpenAI.

    Args:
        values: The object.
        within: Path of the object in the request, for messages.

    Raises:
        Refusal: It is no object.
    """

    def __init__(self, values: object, within: str = ""):
        if not isinstance(values, dict):
            found = reprlib.repr(values)
            raise Refusal(f"{within or 'the body'} must be an object, got {found}", within or None)
        self._left = {name: value for name, value in values.items() if value is not None}
        self._prefix = f"{within}." if within else ""

    def take(self, name: str) -> Any:
        """The value of a field, None where there is none."""
        return self._left.pop(name, None)

    def typed(self, name: str, kind: type[Value]) -> Value | None:
        """The value of a field of one JSON type, None where there is none.

        Raises:
            Refusal: It is of another type.
        """
        value = self.take(name)
        if value is not None and not isinstance(value, kind):
            raise self.refusal(name, _NAMES[kind], value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer field, None where there is none.

        Raises:
            Refusal: It is none, or out of range.
        """
        value = self.take(name)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise self.refusal(name, f"an integer from {low} to {high}", value)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number, None where there is none.

        Raises:
            Refusal: It is none, or out of range.
        """
        value = self.take(name)
        if value is not None and not (is_number(value) and low <= value <= high):
            raise self.refusal(name, f"a number from {low:g} to {high:g}", value)
        return value

    def one_of(self, name: str, choices: Sequence[Any], hint: str = "") -> Any:
        """One of some values, None where there is none.

        Raises:
            Refusal: It is another one.
        """
        value = self.take(name)
        # By type as well, as 1 is True and 0 is 0.0 in Python.
        if value is not None and not any(type(value) is type(c) and value == c for c in choices):
            raise self.refusal(name, " or ".join(map(json.dumps, choices)) + hint, value)
        return value

    def finish(self) -> None:
        """Refuse the fields that were not read.

        Raises:
            Refusal: There is one.
        """
        for name in self._left:
            shown = self._prefix + shortened(name)
            raise Refusal(
                f"{shown} is not supported; leave it out", shown, code="unknown_parameter"
            )

    def refusal(self, name: str, expected: str, value: object) -> Refusal:
        """What to raise for a field that is not as expected."""
        name = self._prefix + name
        return Refusal(f"{name} must be {expected}, got {reprlib.repr(value)}", name)


def shortened(text: str) -> str:
    """A text that may be a client's, short enough for a message."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def parse_json(body: bytes) -> Any:
    """A body's JSON, without the numbers that only Python has in it.

    Raises:
        Refusal: It is no JSON.
    """
    try:
        return json.loads(body, parse_constant=_refuse_constant, parse_float=_parse_finite)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body must be JSON: {shortened(str(error))}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large")
    return value
