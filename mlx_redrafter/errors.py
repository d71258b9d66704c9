"""The exceptions of this package, and the parts of their messages.

Every message gives what was expected, what was found, and what to do. It quotes names and errors
from untrusted files escaped and shortened.
"""

import errno
import reprlib
from collections.abc import Iterable

MAX_LISTED = 12
# Maximum number of characters of a name.
MAX_NAME = 80
# Maximum number of characters of an error, about seven lines of a terminal.
MAX_LINE = 1000

_MAKE_ROOM = "make room on the disk, or choose another one"
_CHANGE_PERMISSIONS = "choose a path that you may use, or change its permissions"
# Advice about a file or a disk, by error number.
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG), _MAKE_ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM), _CHANGE_PERMISSIONS),
    errno.ENAMETOOLONG: "choose a shorter name",
}


def explain(error: OSError) -> str:
    """Describe an error of a file or a disk, and give the remedy."""
    if error.strerror is None:  # from a library, with a text of its own
        return str(error) or type(error).__name__
    advice = _ADVICE.get(error.errno or 0, "choose another path" if error.filename else "")
    return "; ".join(filter(None, [error.strerror, advice]))


def how_to_install(extra: str) -> str:
    return (
        f"pip install '.[{extra}]' in the repository, or 'mlx-redrafter[{extra}]' from a package "
        "index"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its type if it has no text.

    A line that ends with a colon is the title of the next one, which belongs to it.
    """
    title, *others = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join([title, *map(str.strip, others[:1])]) if title.endswith(":") else title


def printable(text: str) -> str:
    """Escape line ends and control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Make one line of a text: escape it, and cut its middle if it is long; the end is advice."""
    line = printable(" ".join(text.split()))
    half = MAX_LINE // 2
    return line if len(line) <= MAX_LINE else f"{line[:half]} [...] {line[-half:]}"


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


class RedrafterError(Exception):
    """Base class of every error that this package raises on purpose; its text is one line."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class ConfigError(RedrafterError, ValueError):
    """An option or a config value is impossible or contradicts another one."""


class CheckpointError(RedrafterError):
    """A checkpoint is missing, truncated, foreign, or does not fit the model it is used with."""


class UnsupportedTargetError(RedrafterError):
    """The target or one of its caches would not be decoded exactly."""


class NonFiniteError(RedrafterError):
    """Weights or logits contain NaN or infinity."""


class DataError(RedrafterError):
    """A file of texts or prompts is missing, malformed, or too small to train on."""


class ResourceError(RedrafterError):
    """The disk or the memory is too small."""
