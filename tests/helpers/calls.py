"""Functions of tests that see each call of another function."""

from collections.abc import Callable
from typing import Any

import pytest


def at_call(patch: pytest.MonkeyPatch, owner: Any, name: str, do: Callable[..., object]) -> None:
    """Do something with the arguments of each call of a function before the function itself."""
    function = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        do(*args, **options)
        return function(*args, **options)

    patch.setattr(owner, name, call)
