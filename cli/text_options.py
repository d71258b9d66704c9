"""Options that several commands share; `GenerationOptions` describes those of a text."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from mlx_redrafter.draft_plan import DraftPlan, find_plan
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


# Help for the three sizes of drafts together.
AUTO = (
    " With auto for this and the next two, every step verifies the drafts whose probabilities are "
    "worth the time, or nothing is drafted."
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
    """Make a typer option for a field of `GenerationOptions`, with its description.

    Args:
        name: Name of the field.
        *flags: Short forms.
        more: Text to add to the description.
        **settings: Arguments of `typer.Option`.
    """
    names = (f"--{name.replace('_', '-')}", *flags) if flags else ()  # typer's own without
    return typer.Option(*names, help=DESCRIPTIONS[name] + more, **settings)


def _size_option(name: str, more: str = "") -> Any:
    # typer has no type for a number or "auto".
    settings = {"parser": parse_size, "metavar": "<int>|auto", "rich_help_panel": DRAFT}
    return library_option(name, more=more, **settings)


MaxTokens = Annotated[int, library_option("max_tokens", "-m")]
Temp = Annotated[float, library_option("temp", rich_help_panel=SAMPLE)]
Seed = Annotated[int, library_option("seed", rich_help_panel=SAMPLE)]
QuantizedKvStart = Annotated[int, library_option("quantized_kv_start", rich_help_panel=CACHE)]
IgnoreChatTemplate = Annotated[
    bool,
    typer.Option("--ignore-chat-template", help="Use the prompt as it is.", rich_help_panel=PROMPT),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


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
    """Length of a text, sampling of its tokens, and quantization of its K/V cache."""

    max_tokens: MaxTokens = GenerationOptions.max_tokens
    kv_bits: Annotated[
        int | None, library_option("kv_bits", show_default=False, rich_help_panel=CACHE)
    ] = GenerationOptions.kv_bits
    kv_group_size: Annotated[int, library_option("kv_group_size", rich_help_panel=CACHE)] = (
        GenerationOptions.kv_group_size
    )
    quantized_kv_start: QuantizedKvStart = GenerationOptions.quantized_kv_start


@dataclass(frozen=True)
class Sizes:
    """Sizes of drafts, each a number or "auto"."""

    beam_width: Annotated[Any, _size_option("beam_width", AUTO)] = GenerationOptions.beam_width
    beam_length: Annotated[Any, _size_option("beam_length")] = GenerationOptions.beam_length
    tree_nodes: Annotated[Any, _size_option("tree_nodes")] = GenerationOptions.tree_nodes

    def plan(self) -> DraftPlan | None:
        """Make the plan of all steps; None if every step has its own.

        Raises:
            ConfigError: A value is out of range, or they contradict each other.
        """
        return find_plan(**vars(self), select="top_n")


@dataclass(frozen=True)
class Drafting(Sizes):
    """All options of drafts."""

    select: Annotated[str, library_option("select", rich_help_panel=DRAFT)] = (
        GenerationOptions.select
    )


def generation_options(text: TextOptions, drafting: Drafting) -> GenerationOptions:
    """Make the options of a text for the library, with a fresh seed if none is given.

    Raises:
        ConfigError: A value is out of range, or they contradict each other.
    """
    values = {**vars(text), **vars(drafting)}
    return GenerationOptions(**{**values, "seed": fresh_seed(values["seed"])})


def fresh_seed(seed: int | None) -> int:
    """Return the given seed, or a new one."""
    return secrets.randbits(32) if seed is None else seed
