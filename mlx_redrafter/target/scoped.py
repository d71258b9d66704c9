"""A context manager that sets a context variable."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class Scoped(Generic[T]):
    """A value of a context variable inside a ``with`` block.

    A class, because every token enters two of these blocks, and one made by contextlib costs more
    than twice the time.
    """

    def __init__(self, variable: ContextVar[T | None], value: T):
        self._variable = variable
        self._value = value

    def __enter__(self) -> T:
        self._token = self._variable.set(self._value)
        return self._value

    def __exit__(self, *error: object) -> None:
        self._variable.reset(self._token)
