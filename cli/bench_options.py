"""Options that the benchmark commands share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.model_options import Model, Pair
from mlx_redrafter.cli.text_options import MODEL, IgnoreChatTemplate, library_option
from mlx_redrafter.draft_plan import DraftPlan, DraftShape, Selection
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_redrafter.bench.runs import EncodedPrompt

PROMPT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, and the old man who lived by the sea said to his daughter:"
)

Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="JSON file for the result.", show_default=False),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where the file ends.")]
TextPrompt = Annotated[str, typer.Option("--prompt", "-p", help="Prompt.", show_default=False)]

TextTokens = Annotated[int, typer.Option("--max-tokens", "-m", help="Most tokens per text.")]
Repeats = Annotated[int, typer.Option(help="Rounds per prompt.")]


@dataclass(frozen=True)
class RecurrentPair(Pair):
    """A target and a recurrent drafter, whose parts are measured one by one."""

    model: Model = None
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            "--draft-model",
            help="Recurrent drafter made for the target: a folder or a hub repository.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None

    def load(self, **options: Any) -> tuple[Any, Any, Any]:
        """See `Pair.load`.

        Raises:
            ConfigError: There is no drafter, or one of another kind.
        """
        if self.model is not None and self.drafter is None:
            raise ConfigError("no drafter given; say --drafter FOLDER")
        model, tokenizer, drafter = super().load(**options)
        from mlx_redrafter.proposers.redrafter.network import Drafter

        if not isinstance(drafter, Drafter):
            raise ConfigError(
                f"--drafter must be a recurrent drafter here, got {self.drafter!r}; `bench "
                "compare` and `bench sweep` measure every kind"
            )
        return model, tokenizer, drafter


@dataclass(frozen=True)
class Shape:
    """Sizes of drafts, all numbers."""

    beam_width: Annotated[int, library_option("beam_width")] = DraftShape.width
    beam_length: Annotated[
        int | None,
        library_option("beam_length", show_default="5, or what the drafter's heads reach"),
    ] = None
    tree_nodes: Annotated[
        int | None, library_option("tree_nodes", show_default="9, or all there are")
    ] = None

    def plan(self, select: Selection = "top_n") -> DraftPlan:
        """The plan of every step; merged beams have as many nodes as they have.

        Raises:
            ConfigError: A size is out of range.
        """
        nodes = self.tree_nodes if select == "top_n" else None
        length = DraftShape.length if self.beam_length is None else self.beam_length
        return DraftPlan.of(self.beam_width, length, nodes, select)

    def fitted(self, plan: DraftPlan, max_length: int | None) -> DraftPlan:
        """A plan that is no longer than drafts can be, unless a length is given."""
        return plan.within(max_length) if self.beam_length is None else plan


@dataclass(frozen=True)
class Prompts:
    """Prompts from a file."""

    prompts: Annotated[
        Path,
        typer.Option(
            help="MT-bench, Spec-Bench or plain .jsonl, or text with empty lines between prompts.",
            show_default=False,
        ),
    ]
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Number of prompts, from all categories in turn; all by default."),
    ] = None
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Cut prompts to their first tokens.", show_default=False)
    ] = None
    ignore_chat_template: IgnoreChatTemplate = False

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_prompt_tokens"):
            if (count := getattr(self, name)) is not None:
                check_int(name, count, 1)

    def encode(self, tokenizer: Any) -> list[EncodedPrompt]:
        """The prompts as token ids.

        Raises:
            ConfigError: The file has no prompts, or the chat template rejects one.
        """
        from mlx_redrafter.bench.prompts import encode, read_prompts, take_in_turn
        from mlx_redrafter.bench.runs import EncodedPrompt

        use_template = not self.ignore_chat_template
        chosen = take_in_turn(read_prompts(self.prompts), self.num_prompts)
        ids = [encode(tokenizer, one, use_template, self.max_prompt_tokens) for one in chosen]
        return [
            EncodedPrompt(prompt.name, prompt.category, encoded)
            for prompt, encoded in zip(chosen, ids, strict=True)
        ]

    def describe(self, prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
        """What a result says of its prompts."""
        return {
            "prompt_file": self.prompts.name,
            "prompts": [[prompt.name, prompt.category, len(prompt.ids)] for prompt in prompts],
        }


@dataclass(frozen=True)
class Rounds:
    """Texts that several ways of decoding write in turns."""

    max_tokens: TextTokens = 128
    repeats: Repeats = 3
    cool_down: Annotated[float, typer.Option(help="Seconds to rest before every run.")] = 0.0
    max_repeated: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Count only texts with at most this share of repeated 4-grams."
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 1)
        check_int("repeats", self.repeats, 1)
        if not 0 <= self.cool_down < math.inf:
            raise ConfigError(f"cool_down must be 0 seconds or more, got {self.cool_down}")

    def describe(self) -> dict[str, Any]:
        """What a result says of them before it is there."""
        return {
            "max_tokens": self.max_tokens,
            "repeats": self.repeats,
            "cool_down": self.cool_down,
        }


@dataclass(frozen=True)
class ShortRounds(Rounds):
    """Fewer and shorter texts, for ways that are many."""

    max_tokens: TextTokens = 64
    repeats: Repeats = 2
