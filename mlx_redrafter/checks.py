"""Checks of numbers from callers."""

from __future__ import annotations

from mlx_redrafter.errors import ConfigError


def check_int(name: str, value: object, low: int, high: int | None = None, hint: str = "") -> None:
    """Raise `ConfigError` unless ``value`` is an integer in ``[low, high]``."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
        expected = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be an integer {expected}{hint}, got {value!r}")


def check_max_tokens(value: object) -> None:
    """Raise `ConfigError` unless ``value`` is a number of tokens, or -1 for no limit."""
    check_int("max_tokens", value, -1, hint=" (-1: no limit)")
    if value == 0:
        raise ConfigError("max_tokens must be 1 or more, or -1 for no limit, got 0")


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
