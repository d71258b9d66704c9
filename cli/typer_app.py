"""Typer applications whose commands accept option groups and plain descriptions.

An option group is a dataclass whose fields are options. A command that has one as a parameter has
an option for each of its fields. An option is a type, a description, and its names if ``--field``
is not the only one; short names are added to that one.

    @dataclass(frozen=True)
    class Pair:
        model: Annotated[str | None, "Target."] = None
        drafter: Annotated[str | None, "Drafter.", "--drafter", "--draft-model"] = None

    @app.command()
    def check(pair: Pair, verbose: Annotated[bool, "Print more.", "-v"] = False) -> None: ...

A group may also be a record of the library; fields without a description are no options. The help
lists the options of a group under its ``panel``, or else the name of the parameter. A
`typer.Option` in place of the description has the settings of rare options.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from shutil import get_terminal_size
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.models import ArgumentInfo, ParameterInfo

from mlx_redrafter.cli.names import names_beginning

OptionGroup = TypeVar("OptionGroup")
# Name of the parameter with the model in the form that the command does not declare.
OTHER_FORM = "model_in_other_form"
# Names of the parameters that the shell completes by the models on this machine.
NAMES = {"model", OTHER_FORM, "name", "source", "drafter", "stock_draft_model"}
# Settings of every command.
CONTEXT = {"help_option_names": ["-h", "--help"]}


class _ReadableHelp:
    """A mixin whose help shows flags without a type and arguments in capitals, and cuts no name.

    Tables of options need 80 columns; terminals that are narrower get lines without tables.
    """

    rich_markup_mode: Any

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if get_terminal_size().columns < 80:
            self.rich_markup_mode = None
        super().format_help(ctx, formatter)  # type: ignore[misc]

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in params:
            if isinstance(one, TyperOption) and one.is_flag:
                one.metavar = ""
            elif isinstance(one, TyperArgument):
                one.metavar = one.metavar or str(one.name).upper()
        return params


class Command(_ReadableHelp, TyperCommand):
    """A command."""


class CommandGroup(_ReadableHelp, TyperGroup):
    """A command that has commands of its own."""


class Application(typer.Typer):
    def __init__(self, **settings: Any):
        super().__init__(cls=CommandGroup, context_settings=CONTEXT, **settings)

    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:
        """Register a command, as `typer.Typer.command` does."""
        settings = {"cls": Command, "context_settings": CONTEXT, **settings}
        register = super().command(*args, **settings)

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

    _add_other_form(options)
    model_hint = get_args(options["model"].annotation)[0] if "model" in options else None
    takes_several = list[str] in get_args(model_hint)
    for name in NAMES & options.keys():
        for part in get_args(options[name].annotation):
            if isinstance(part, ParameterInfo):
                part.autocompletion = names_beginning

    @wraps(command)
    def with_groups(**values: Any) -> None:
        if (other := values.pop(OTHER_FORM, None)) is not None:
            if values["model"]:
                raise typer.BadParameter("the model is given twice; leave one out")
            values["model"] = [other] if takes_several else other
            if (context := values.get("context")) is not None:
                context.set_parameter_source("model", context.get_parameter_source(OTHER_FORM))
        packed = {name: pack(group, values) for name, group in groups.items()}
        grouped = {field.name for group in groups.values() for field in fields(group)}
        command(**packed, **{name: values[name] for name in values if name not in grouped})

    # Typer reads these two.
    with_groups.__signature__ = Signature([*options.values()])  # type: ignore[attr-defined]
    with_groups.__annotations__ = {name: one.annotation for name, one in options.items()}
    return with_groups


def _add_other_form(options: dict[str, Parameter]) -> None:
    """Let a command take its model as the argument and as ``--model``, whichever it declares.

    A command with arguments of its own keeps the form that it declares.
    """
    arguments = [
        name
        for name, one in options.items()
        if any(isinstance(part, ArgumentInfo) for part in get_args(one.annotation))
    ]
    if "model" not in options or arguments not in ([], ["model"]):
        return
    other = typer.Option("--model", help="The same as the argument.")
    if not arguments:
        other = typer.Argument(metavar="MODEL", help="The same as --model.")
    options[OTHER_FORM] = _option(OTHER_FORM, None, Annotated[str | None, other])


def _options_of(group: type[Any], panel: str) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        if get_origin(hints[field.name]) is Annotated:
            default = Parameter.empty if field.default is MISSING else field.default
            panel = getattr(group, "panel", panel)
            yield _option(field.name, default, hints[field.name], panel)


def _option(name: str, default: object, hint: Any, panel: str | None = None) -> Parameter:
    if get_origin(hint) is Annotated:
        kind, described, *names = get_args(hint)
        if isinstance(described, str):
            if not any(one.startswith("--") for one in names):
                names.insert(0, f"--{name.replace('_', '-')}")
            hint = Annotated[kind, typer.Option(*names, help=described, rich_help_panel=panel)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
