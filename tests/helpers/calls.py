"""Functions of tests that see each call of another function."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest


def at_call(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    do: Callable[..., object],
    number: int | None = None,
) -> None:
    """Do something with the arguments of each call of a function before the function itself.

    With a number, at the call of this number alone; the first one has the number 1.
    """
    function, calls = getattr(owner, name), count(1)

    def call(*args: Any, **options: Any) -> Any:
        if number in (None, next(calls)):
            do(*args, **options)
        return function(*args, **options)

    patch.setattr(owner, name, call)
