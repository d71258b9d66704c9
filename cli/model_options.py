"""Options of the model and of what drafts for it, and their loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.text_options import MODEL
from mlx_redrafter.draft_plan import MAX_OUTCOMES
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_redrafter.decoding.protocols import Proposer

    Loaded = tuple[nn.Module, TokenizerWrapper, Proposer]

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Target: a folder or a hub repository. The bundled pair by default.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
NamedModel = Annotated[
    str | None,
    typer.Option("--model", help="Target: a folder or a hub repository.", rich_help_panel=MODEL),
]
AnyDrafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        "--draft-model",
        help="Recurrent drafter, EAGLE head, Medusa heads, MTP module or SpecFormer made for the "
        "target, or a smaller model of the same tokens: a folder or a hub repository; or mtp, for "
        "the module in the target's own files; or lookup, the default with --model, for drafts out "
        "of the text itself.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
AdapterPath = Annotated[
    str | None,
    typer.Option("--adapter-path", help="LoRA adapter of the target.", rich_help_panel=MODEL),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code from the target's checkpoint.", rich_help_panel=MODEL
    ),
]
Predraft = Annotated[
    int,
    typer.Option(
        "--predraft",
        help="Outcomes of each forward pass to draft for while it runs, on the CPU; for recurrent "
        "drafters and smaller models.",
        show_default="none",
        rich_help_panel=MODEL,
    ),
]
NoKernels = Annotated[
    bool,
    typer.Option(
        "--no-kernels",
        help="Only MLX's own kernels; so does MLX_REDRAFTER_KERNELS=0.",
        rich_help_panel=MODEL,
    ),
]


@dataclass(frozen=True)
class Pair:
    """A target and what drafts for it: by default the bundled pair, with a model lookup.

    A drafter without a model is one for the bundled target.
    """

    model: Model = None
    drafter: AnyDrafter = None
    no_kernels: NoKernels = False

    @property
    def drafter_name(self) -> str | None:
        """The drafter given, or lookup where a model has none; None for the bundled one."""
        return "lookup" if self.drafter is None and self.model is not None else self.drafter

    def load(self, **options: Any) -> Loaded:
        """Load the target, its tokenizer and the drafter.

        Args:
            **options: Further options of `mlx_redrafter.load`.
        """
        from mlx_redrafter.checkpoints.loading import load
        from mlx_redrafter.proposers.lookup import Lookup

        own = {"drafter": self.drafter, "kernels": not self.no_kernels}
        model, tokenizer, drafter = load(self.model, **{**own, **options})
        if self.model is None:
            _say_bundled(model)
        return model, tokenizer, Lookup() if drafter is None else drafter


@dataclass(frozen=True)
class AdaptedPair(Pair):
    """A pair whose target may have an adapter and code of its own."""

    adapter_path: AdapterPath = None
    trust_remote_code: TrustRemoteCode = False

    def load(self, **options: Any) -> Loaded:
        """See `Pair.load`."""
        return super().load(
            adapter_path=self.adapter_path, trust_remote_code=self.trust_remote_code, **options
        )


@dataclass(frozen=True)
class WritingPair(AdaptedPair):
    """A pair that writes a text, drafted or not, up to one of its stop tokens."""

    no_draft: Annotated[
        bool,
        typer.Option("--no-draft", help="Plain decoding by the same code.", rich_help_panel=MODEL),
    ] = False
    predraft: Predraft = 0
    extra_eos_token: Annotated[
        list[str] | None,
        typer.Option("--extra-eos-token", help="Also stop at this token.", rich_help_panel=MODEL),
    ] = None

    def __post_init__(self) -> None:
        check_int("predraft", self.predraft, 0, MAX_OUTCOMES)

    def load(self, **options: Any) -> tuple[nn.Module, TokenizerWrapper, Any]:
        """See `Pair.load`; no weights of a drafter with ``--no-draft``."""
        model, tokenizer, drafter = super().load(
            **({"drafter": None} if self.no_draft else {}), **options
        )
        for token in self.extra_eos_token or ():
            _add_stop_token(tokenizer, token)
        if self.predraft:
            from mlx_redrafter.proposers.speculate_ahead import SpeculateAhead

            return model, tokenizer, SpeculateAhead(drafter, self.predraft)
        return model, tokenizer, drafter


def _say_bundled(model: nn.Module) -> None:
    from mlx_redrafter.checkpoint_files import named_parameters

    size = sum(tensor.size for tensor in named_parameters(model).values())
    typer.echo(
        f"no --model given: using the bundled demonstration model ({size / 1e6:.1f}M parameters, "
        "trained on public-domain books); --model FOLDER or ORG/NAME for your own",
        err=True,
    )


def _add_stop_token(tokenizer: TokenizerWrapper, token: str) -> None:
    # A tokenizer may answer with its unknown token for a name it does not know.
    vocabulary = tokenizer.get_vocab()
    is_id = token.isdecimal() and int(token) in vocabulary.values()
    if not is_id and token not in vocabulary:
        raise ConfigError(f"--extra-eos-token must be a token of the model or an id, got {token!r}")
    tokenizer.add_eos_token(token)
