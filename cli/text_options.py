"""Options of a text that several commands share; `GenerationOptions` describes them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from mlx_redrafter.generation_options import (
    SAMPLING_NAMES,
    GenerationOptions,
    SamplingParams,
)

MODEL, DRAFT, SAMPLE, PROMPT, CACHE = "Model", "Drafting", "Sampling", "Prompt", "K/V cache"

DESCRIPTIONS: dict[str, str] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(GenerationOptions, include_extras=True).items()
}

# Added to the help of the first of three options, which work together.
AUTO = (
    " If this and the next two options are auto, every step chooses the number of drafts that is "
    "fastest on this machine, which may be none."
)


def parse_size(value: str) -> int | str:
    """Parse a number, or ``auto``."""
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"expected a number or auto, got {value!r}") from None


def library_option(name: str, *flags: str, more: str = "", **settings: Any) -> Any:
    """Make a typer option for a field of `GenerationOptions`, described as there."""
    names = (f"--{name.replace('_', '-')}", *flags) if flags else ()  # typer's own without
    return typer.Option(*names, help=DESCRIPTIONS[name] + more, **settings)


def _size_option(name: str, more: str = "") -> Any:
    # Typer has no type for a number or "auto".
    settings = {"parser": parse_size, "metavar": "<int>|auto", "rich_help_panel": DRAFT}
    return library_option(name, more=more, **settings)


MaxTokens = Annotated[int, library_option("max_tokens", "-m")]
Temp = Annotated[float, library_option("temp", rich_help_panel=SAMPLE)]
Seed = Annotated[int, library_option("seed", rich_help_panel=SAMPLE)]
Overwrite = Annotated[
    bool, "Allow other files where this writes, but never the model, the drafter or the data."
]
IgnoreChatTemplate = Annotated[bool, "Use the prompt without the chat template."]


Record = TypeVar("Record")


def _with_sampling(record: type[Record]) -> type[Record]:
    """Add the sampling options of `SamplingParams` to a record of options."""
    hints = get_type_hints(SamplingParams)
    for name in SAMPLING_NAMES:
        kind, default, settings = hints[name], getattr(SamplingParams, name), {}
        if name == "seed":
            kind, default, settings = kind | None, None, {"show_default": "fresh"}
        option = library_option(name, rich_help_panel=SAMPLE, **settings)
        record.__annotations__[name] = Annotated[kind, option]
        setattr(record, name, default)
    return record


@dataclass(frozen=True)
@_with_sampling
class TextOptions:
    """Length of a text, sampling, and quantization of the K/V cache."""

    max_tokens: MaxTokens = GenerationOptions.max_tokens
    kv_bits: Annotated[int | None, library_option("kv_bits", rich_help_panel=CACHE)] = (
        GenerationOptions.kv_bits
    )


@dataclass(frozen=True)
class WholeTextOptions(TextOptions):
    """All options of a text."""

    kv_group_size: Annotated[int, library_option("kv_group_size", rich_help_panel=CACHE)] = (
        GenerationOptions.kv_group_size
    )
    quantized_kv_start: Annotated[
        int, library_option("quantized_kv_start", rich_help_panel=CACHE)
    ] = GenerationOptions.quantized_kv_start


@dataclass(frozen=True)
class AnswerOptions(TextOptions):
    """Options of answers in a chat, which may be long."""

    max_tokens: MaxTokens = 2048


@dataclass(frozen=True)
class DraftSizeOptions:
    """Sizes of drafts, each a number or "auto"."""

    beam_width: Annotated[Any, _size_option("beam_width", AUTO)] = GenerationOptions.beam_width
    beam_length: Annotated[Any, _size_option("beam_length")] = GenerationOptions.beam_length
    tree_nodes: Annotated[Any, _size_option("tree_nodes")] = GenerationOptions.tree_nodes


@dataclass(frozen=True)
class DraftOptions(DraftSizeOptions):
    """All options of drafts."""

    select: Annotated[str, library_option("select", rich_help_panel=DRAFT)] = (
        GenerationOptions.select
    )


def generation_options(*groups: TextOptions | DraftSizeOptions) -> GenerationOptions:
    """Convert option groups to the library's options, with a fresh seed if none is given.

    Raises:
        ConfigError: A value is out of range, or they contradict each other.
    """
    values = {name: value for group in groups for name, value in vars(group).items()}
    if values["seed"] is None:
        values["seed"] = secrets.randbits(32)
    return GenerationOptions(**values)
