"""Quote, escape and shorten names and errors from untrusted files, for messages."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

from mlx_redrafter.errors import first_line, one_line, printable

# Maximum number of characters of a name.
MAX_NAME = 80
# Maximum number of items of a list.
MAX_LISTED = 12


def quote(name: str) -> str:
    """Put ``name`` in quotes, escape it, and shorten it if it is long."""
    return ascii(name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}...")


def shown(value: object) -> str:
    """Represent any value in one short line."""
    return one_line(reprlib.repr(value))


def join_shortened(parts: Iterable[str], separator: str = ", ") -> str:
    """Join the first `MAX_LISTED` parts, and count the others."""
    parts = list(parts)
    shown = separator.join(parts[:MAX_LISTED])
    hidden = len(parts) - MAX_LISTED
    return f"{shown}{separator}and {hidden} more" if hidden > 0 else shown


def describe_error(error: BaseException) -> str:
    """Return the first line of an error's text, which may quote a file, escaped and shortened."""
    text = printable(first_line(error)[: 2 * MAX_NAME + 1])
    return text if len(text) <= 2 * MAX_NAME else f"{text[: 2 * MAX_NAME]}..."
