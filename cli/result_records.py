"""Records of options: a parameter of a command that stands for several options on the line.

    @dataclass(frozen=True)
    class Pair:
        model: Annotated[str | None, typer.Option(help="Target.")] = None
        drafter: Annotated[str | None, typer.Option(help="Drafter.")] = None

    @takes_records
    def check(pair: Pair, debug: bool = False) -> None: ...

The command has the options --model, --drafter and --debug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar, get_type_hints

Record = TypeVar("Record")


def takes_records(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer whose parameters of dataclass types are given field by field."""
    hints = get_type_hints(command, include_extras=True)
    options: list[Parameter] = []
    records: dict[str, type[Any]] = {}
    for name, parameter in signature(command).parameters.items():
        if is_dataclass(hints[name]):
            records[name] = hints[name]
            options += _options(hints[name])
        else:
            options.append(_option(name, parameter.default, hints[name]))

    @wraps(command)
    def with_records(**values: Any) -> None:
        packed = {name: pack(record, values) for name, record in records.items()}
        taken = {field.name for record in records.values() for field in fields(record)}
        command(**packed, **{name: values[name] for name in values if name not in taken})

    # What typer reads.
    with_records.__signature__ = Signature(options)  # type: ignore[attr-defined]
    with_records.__annotations__ = {option.name: option.annotation for option in options}
    return with_records


def pack(record: type[Record], values: Mapping[str, Any]) -> Record:
    """A record made of the values that have the names of its fields."""
    return record(**{field.name: values[field.name] for field in fields(record)})  # type: ignore[arg-type]


def _options(record: type[Any]) -> Iterator[Parameter]:
    hints = get_type_hints(record, include_extras=True)
    for field in fields(record):
        default = Parameter.empty if field.default is MISSING else field.default
        yield _option(field.name, default, hints[field.name])


def _option(name: str, default: object, hint: object) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
