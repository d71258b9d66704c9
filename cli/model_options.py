"""Options that name the target and the drafter, and the loading of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.cli.text_options import MODEL
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_redrafter.decoding.protocols import Proposer

    Loaded = tuple[nn.Module, TokenizerWrapper, Proposer]

# The drafter's name that stands for plain decoding.
NO_DRAFTER = "none"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model that writes the text (the target): a folder or a hub repository. By default "
        "the bundled demonstration model.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
NamedModel = Annotated[
    str | None,
    typer.Option("--model", help="Target: a folder or a hub repository.", rich_help_panel=MODEL),
]


def _drafter_option(more: str = "") -> Any:
    return typer.Option(
        "--drafter",
        "--draft-model",
        help="Drafter made for the target (recurrent, EAGLE, Medusa, MTP, SpecFormer) or a smaller "
        "model with the same tokens: a folder or a hub repository. Or a word: lookup for prompt "
        f"lookup, the default with --model; mtp for the module in the target's own files{more}.",
        show_default=False,
        rich_help_panel=MODEL,
    )


AnyDrafter = Annotated[str | None, _drafter_option()]
AdapterPath = Annotated[
    str | None,
    typer.Option(
        "--adapter-path", help="Folder of a LoRA adapter for the target.", rich_help_panel=MODEL
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Allow the target's checkpoint to run its own Python code.",
        rich_help_panel=MODEL,
    ),
]

Predraft = Annotated[
    int,
    typer.Option(
        "--predraft",
        help="Draft on the CPU, while the target computes on the GPU, for this many likely results "
        "of its pass (speculative speculative decoding); for recurrent drafters and smaller "
        "models.",
        show_default="off",
        rich_help_panel=MODEL,
    ),
]


@dataclass(frozen=True)
class Pair:
    """A target and a drafter: the bundled pair by default, prompt lookup with a model alone.

    A drafter without a model is one for the bundled target.
    """

    model: Model = None
    drafter: AnyDrafter = None

    @property
    def drafter_name(self) -> str | None:
        """The drafter given, or lookup if there is only a model; None for the bundled one."""
        return "lookup" if self.drafter is None and self.model is not None else self.drafter

    def load(self, **options: Any) -> Loaded:
        """Load the target, its tokenizer and the drafter.

        Args:
            **options: Further options of `mlx_redrafter.load`.

        Raises:
            ConfigError: The drafter is "none", where there must be one.
        """
        if self.drafter == NO_DRAFTER:
            raise ConfigError("expected a drafter, found --drafter none; name one, or lookup")
        return self._load(drafter=self.drafter, **options)

    def _load(self, **options: Any) -> Loaded:
        from mlx_redrafter.checkpoints.loading import load
        from mlx_redrafter.proposers.lookup import Lookup

        model, tokenizer, drafter = load(self.model, **options)
        if self.model is None:
            _say_bundled(model)
        return model, tokenizer, Lookup() if drafter is None else drafter


@dataclass(frozen=True)
class AdaptedPair(Pair):
    """A pair whose target may have a LoRA adapter and code of its own."""

    adapter_path: AdapterPath = None
    trust_remote_code: TrustRemoteCode = False

    def _load(self, **options: Any) -> Loaded:
        return super()._load(
            adapter_path=self.adapter_path, trust_remote_code=self.trust_remote_code, **options
        )


@dataclass(frozen=True)
class WritingPair(AdaptedPair):
    """A pair that writes a text, with drafts or by plain decoding."""

    drafter: Annotated[
        str | None, _drafter_option("; none for plain decoding, one token per forward pass")
    ] = None

    @property
    def drafts(self) -> bool:
        """Whether there is a drafter."""
        return self.drafter != NO_DRAFTER

    def load_writer(self) -> tuple[nn.Module, TokenizerWrapper, Proposer | None]:
        """Load the target, its tokenizer and the drafter, which is None for plain decoding."""
        model, tokenizer, drafter = self._load(drafter=self.drafter if self.drafts else None)
        return model, tokenizer, drafter if self.drafts else None


def _say_bundled(model: nn.Module) -> None:
    from mlx_redrafter.checkpoint_files import named_parameters

    size = sum(tensor.size for tensor in named_parameters(model).values())
    typer.echo(
        f"no --model given: using the bundled demonstration model ({size / 1e6:.1f}M parameters, "
        "trained on public-domain books); for your own, give --model FOLDER or --model ORG/NAME",
        err=True,
    )
