"""Checks of values and of texts from callers."""

import json
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_redrafter.errors import ConfigError, explain, shown

# Encoding of the user's texts: some editors put a byte order mark before the first character.
TEXT_ENCODING = "utf-8-sig"


def read_file(
    path: Path, content: str, hint: str = "; give a file", max_bytes: float = math.inf
) -> str:
    """Read a file of text; a pipe or a device such as /dev/zero may have no end."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"expected a file with {content}, found something else: {path}{hint}")
    try:
        if path.stat().st_size > max_bytes:
            raise ConfigError(
                f"expected {content} of at most {max_bytes} bytes, found a larger file: {path}; "
                "give a smaller one"
            )
        return path.read_text(encoding=TEXT_ENCODING)
    except OSError as error:
        raise ConfigError(f"{path}: {explain(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8 text: {error}") from error


def parse_line(line: str) -> Any:
    """Parse a line of JSON with texts for a tokenizer.

    Raise ValueError if it is not JSON or has half of a surrogate pair, which may come as an escape,
    and RecursionError if it is too deep.
    """
    value = json.loads(line)
    if "\\ud" in line.lower():  # UTF-8 and tokenizers have no halves
        json.dumps(value, ensure_ascii=False).encode()
    return value


def check_int(name: str, value: object, low: int, high: int | None = None, hint: str = "") -> None:
    """Raise `ConfigError` unless ``value`` is an integer in ``[low, high]``."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
        expected = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be an integer {expected}{hint}, got {value!r}")


def check_number(name: str, value: object, low: float, high: float, hint: str = "") -> None:
    """Raise `ConfigError` unless ``value`` is a number in ``[low, high]``."""
    if not is_number(value) or not low <= value <= high:  # type: ignore[operator]
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}{hint}, got {value!r}")


def check_positive(name: str, value: object, high: float = math.inf) -> None:
    """Raise `ConfigError` unless ``value`` is a finite number in ``(0, high]``."""
    if not is_number(value) or not 0 < value < math.inf or value > high:  # type: ignore[operator]
        limit = "" if high == math.inf else f" and at most {high}"
        raise ConfigError(f"{name} must be a number above 0{limit}, got {value!r}")


def check_multiple(name: str, value: int, of: str, divisor: int) -> None:
    """Raise `ConfigError` unless ``value`` is a multiple of the value of that name."""
    if value % divisor:
        raise ConfigError(f"{name} must be a multiple of {of}, got {value} and {divisor}")


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise `ConfigError` unless ``value`` is one of the choices."""
    if not is_one_of(value, choices):
        raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def check_max_tokens(value: object) -> None:
    """Raise `ConfigError` unless ``value`` is a number of tokens, or -1 for no limit."""
    check_int("max_tokens", value, -1, hint=" (-1: no limit)")
    if value == 0:
        raise ConfigError("max_tokens must be 1 or more, or -1 for no limit, got 0")


def check_instance(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise `ConfigError` unless ``value`` is of this kind, which ``expected`` describes."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {expected}, got {shown(value)}")


def token_ids(name: str, values: Any, expected: str = "a list of token ids") -> list[int]:
    """Return token ids as a list; raise `ConfigError` unless they are whole numbers."""
    try:
        ids = list(values.tolist() if hasattr(values, "tolist") else values)
        if isinstance(values, bytes) or any(isinstance(token, bool) for token in ids):
            raise TypeError
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise ConfigError(f"{name} must be {expected}, got {shown(values)}") from error


def check_vocabulary(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise `ConfigError` unless all token ids are in the vocabulary.

    For other ids, MLX reads memory beyond the embedding.
    """
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise ConfigError(f"{name} must be from 0 to {vocab_size - 1}, got {token}")


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return an object of a JSON file, or an empty one in place of another value."""
    return value if isinstance(value, Mapping) else {}


def is_number(value: object) -> bool:
    """Return True if a value is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_one_of(value: object, choices: Iterable[object]) -> bool:
    """Return True if a value is a choice and of its type: 1 == True and 0 == 0.0 in Python."""
    return any(type(value) is type(one) and value == one for one in choices)
