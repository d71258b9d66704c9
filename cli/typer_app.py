"""What all groups of commands share: help without a type beside options that take no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption


class _Plain:
    """A command or group whose flags show no type in its help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options and arguments, ``--help`` among them."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in params:
            if isinstance(one, TyperOption) and one.is_flag:
                one.metavar = ""
        return params


class Command(_Plain, TyperCommand):
    """A command."""


class Group(_Plain, TyperGroup):
    """A group of commands."""


class Application(typer.Typer):
    """A group of commands, each of which is a `Command`."""

    def __init__(self, cls: type[Group] = Group, **settings: Any):
        super().__init__(cls=cls, **settings)

    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:
        """See `typer.Typer.command`."""
        return super().command(*args, **{"cls": Command, **settings})
