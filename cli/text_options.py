"""Options of a text that several commands share; `GenerationOptions` describes them."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from mlx_redrafter.generation_options import SAMPLING_NAMES, GenerationOptions, SamplingParams

MODEL, DRAFT, SAMPLE, CACHE = "Model", "Drafting", "Sampling", "K/V cache"
# Sizes of drafts, each a number or "auto".
DRAFT_SIZES = ("beam_width", "beam_length", "tree_nodes")
# Panels of options in the help.
PANELS = {
    **dict.fromkeys(SAMPLING_NAMES, SAMPLE),
    **dict.fromkeys(("kv_bits", "kv_group_size", "quantized_kv_start"), CACHE),
    **dict.fromkeys((*DRAFT_SIZES, "select"), DRAFT),
}
# Added to the help of the first of three options, which work together.
AUTO = (
    " If this and the next two options are auto, every step chooses the number of drafts that is "
    "fastest on this machine, which may be none."
)

Record = TypeVar("Record")


def parse_size(value: str) -> int | str:
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"expected a number or auto, got {value!r}") from None


def library_option(name: str, *flags: str) -> Any:
    """Make a typer option for a field of `GenerationOptions`, described as there."""
    hint = get_type_hints(GenerationOptions, include_extras=True)[name]
    names = (f"--{name.replace('_', '-')}", *flags) if flags else ()  # typer's own without
    described = hint.__metadata__[0] + (AUTO if name == "beam_width" else "")
    # Typer has no type for a number or "auto".
    sizes: Any = {"parser": parse_size, "metavar": "<int>|auto"} if name in DRAFT_SIZES else {}
    return typer.Option(*names, help=described, rich_help_panel=PANELS.get(name), **sizes)


MaxTokens = Annotated[int, library_option("max_tokens", "-m")]
Temp = Annotated[float, library_option("temp")]
Seed = Annotated[int, library_option("seed")]
Overwrite = Annotated[
    bool, "Allow other files where this writes, but never the model, the drafter or the data."
]
IgnoreChatTemplate = Annotated[bool, "Use the prompt without the chat template."]


def with_library_options(*names: str) -> Callable[[type[Record]], type[Record]]:
    """Add options of `GenerationOptions` to a record, with the defaults of `SamplingParams`."""
    hints = {**get_type_hints(GenerationOptions), **get_type_hints(SamplingParams)}
    hints |= {**dict.fromkeys(DRAFT_SIZES, Any), "select": str}  # the library checks their words

    def add(record: type[Record]) -> type[Record]:
        for name in names:
            kind, option = hints[name], library_option(name)
            default = getattr(SamplingParams, name, getattr(GenerationOptions, name))
            if name == "seed":
                kind, default, option.show_default = kind | None, None, "fresh"
            record.__annotations__[name] = Annotated[kind, option]
            setattr(record, name, default)
        return record

    return add


@dataclass(frozen=True)
@with_library_options(*SAMPLING_NAMES, "kv_bits")
class TextOptions:
    """Length of a text, sampling, and quantization of the K/V cache."""

    max_tokens: MaxTokens = GenerationOptions.max_tokens


@dataclass(frozen=True)
@with_library_options("kv_group_size", "quantized_kv_start")
class WholeTextOptions(TextOptions):
    """All options of a text."""


@dataclass(frozen=True)
class AnswerOptions(TextOptions):
    """Options of answers in a chat, which may be long."""

    max_tokens: MaxTokens = 2048


@dataclass(frozen=True)
@with_library_options(*DRAFT_SIZES)
class DraftSizeOptions:
    """Sizes of drafts, each a number or "auto"."""


@dataclass(frozen=True)
@with_library_options("select")
class DraftOptions(DraftSizeOptions):
    """All options of drafts."""


def generation_options(*groups: TextOptions | DraftSizeOptions) -> GenerationOptions:
    """Convert option groups to the library's options, with a fresh seed if none is given."""
    values = {name: value for group in groups for name, value in vars(group).items()}
    if values["seed"] is None:
        values["seed"] = secrets.randbits(32)
    return GenerationOptions(**values)
