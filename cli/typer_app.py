"""Typer applications whose commands accept option groups.

An option group is a dataclass whose fields are options. A command that has one as a parameter has
an option for each of its fields:

    @dataclass(frozen=True)
    class Pair:
        model: Annotated[str | None, typer.Option(help="Target.")] = None
        drafter: Annotated[str | None, typer.Option(help="Drafter.")] = None

    @app.command()
    def check(pair: Pair, verbose: bool = False) -> None: ...

A group may also be a record of the library, whose fields have a description instead of a
`typer.Option`, and further names of the option after it; fields without a description are no
options. The help lists them under the name of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

OptionGroup = TypeVar("OptionGroup")


class _PlainFlags:
    """A mixin that shows no type next to flags in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """List the options and arguments, ``--help`` among them."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in params:
            if isinstance(one, TyperOption) and one.is_flag:
                one.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command."""


class CommandGroup(_PlainFlags, TyperGroup):
    """A command that has commands of its own."""


class Application(typer.Typer):
    """A typer application whose commands accept option groups."""

    def __init__(self, cls: type[CommandGroup] = CommandGroup, **settings: Any):
        super().__init__(cls=cls, **settings)

    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:
        """Register a command, as `typer.Typer.command` does."""
        register = super().command(*args, **{"cls": Command, **settings})

        def decorate(function: Callable[..., None]) -> Callable[..., None]:
            register(_expand_groups(function))
            return function

        return decorate


def pack(group: type[OptionGroup], values: Mapping[str, Any]) -> OptionGroup:
    """Make an option group of the values that have the names of its fields."""
    names = [field.name for field in fields(group)]  # type: ignore[arg-type]
    return group(**{name: values[name] for name in names if name in values})


def _expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each option group among a command's parameters by its fields."""
    hints = get_type_hints(command, include_extras=True)
    options: dict[str, Parameter] = {}
    groups: dict[str, type[Any]] = {}
    for name, parameter in signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            # Groups that have an option of the same name share it.
            options |= {one.name: one for one in _options_of(hints[name], name.capitalize())}
        else:
            options[name] = _option(name, parameter.default, hints[name])

    @wraps(command)
    def with_groups(**values: Any) -> None:
        packed = {name: pack(group, values) for name, group in groups.items()}
        grouped = {field.name for group in groups.values() for field in fields(group)}
        command(**packed, **{name: values[name] for name in values if name not in grouped})

    # Typer reads these two.
    with_groups.__signature__ = Signature([*options.values()])  # type: ignore[attr-defined]
    with_groups.__annotations__ = {name: one.annotation for name, one in options.items()}
    return with_groups


def _options_of(group: type[Any], panel: str) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        hint, default = hints[field.name], field.default
        if get_origin(hint) is not Annotated:
            continue
        kind, described, *names = get_args(hint)
        if isinstance(described, str):
            names = [f"--{field.name.replace('_', '-')}", *names]
            hint = Annotated[kind, typer.Option(*names, help=described, rich_help_panel=panel)]
        yield _option(field.name, Parameter.empty if default is MISSING else default, hint)


def _option(name: str, default: object, hint: object) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
