"""Options of the target and the drafter, the choice of a drafter, and the loading of both."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

import mlx_redrafter
from mlx_redrafter.checkpoint_files import find_checkpoint, named_parameters
from mlx_redrafter.checkpoints.bundled import expand_name
from mlx_redrafter.cli.machines import launched_group
from mlx_redrafter.cli.names import ask_for_drafter, confirm, find_model
from mlx_redrafter.cli.progress import note
from mlx_redrafter.cli.text_options import MODEL
from mlx_redrafter.errors import ConfigError, RedrafterError

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_redrafter.checkpoints.drafter_search import DrafterSearch, FoundDrafter
    from mlx_redrafter.checkpoints.memory_check import Context
    from mlx_redrafter.decoding.protocols import Proposer

    Loaded = tuple[nn.Module, TokenizerWrapper, Proposer]

# Tokens of a text for which there must be memory, unless a command knows better.
CONTEXT = 4096
# Word for the drafter that `choose_drafter` chooses.
AUTO = "auto"
# Word for prompt lookup, which needs no files.
LOOKUP = "lookup"
# Word for plain decoding.
NO_DRAFTER = "none"

NamedModel = Annotated[
    str | None,
    "Target: a folder, a hub repository, or the last part of the name of one on this machine.",
]


def _drafter_option(
    more: str = "", default: str = ". By default one on this machine, or lookup"
) -> Any:
    return typer.Option(
        "--drafter",
        "--draft-model",
        help="Drafter made for the target (recurrent, EAGLE, Medusa, MTP, block, SpecFormer) or a "
        "smaller model with the same tokens: a folder or a hub repository. Or a word: auto for one "
        "that is made for the target, on this machine or published; lookup for prompt lookup; mtp "
        f"for the module in the target's own files{more}{default}.",
        rich_help_panel=MODEL,
    )


_NONE = "; none for plain decoding, one token per forward pass"

AnyDrafter = Annotated[str | None, _drafter_option()]
AutoDrafter = Annotated[str, _drafter_option(_NONE, "")]
Yes = Annotated[bool, "Download the model and its drafter without a question."]
AdapterPath = Annotated[str | None, "Folder of a LoRA adapter for the target."]
TrustRemoteCode = Annotated[bool, "Allow the target's checkpoint to run its own Python code."]


def refuse_none(drafter: str | None) -> None:
    """Raise `ConfigError` for the word of plain decoding, where there must be a drafter."""
    if drafter == NO_DRAFTER:
        raise ConfigError("expected a drafter, found --drafter none; name one, or lookup")


@dataclass(frozen=True)
class Pair:
    """A target and a drafter: the bundled pair by default, and else a drafter made for the target.

    A drafter without a model is one for the bundled target.
    """

    panel: ClassVar = MODEL
    model: Annotated[
        str | None,
        "Model that writes the text (the target): a folder, a hub repository, or the last "
        "part of the name of one on this machine. By default the bundled demonstration model.",
    ] = None
    drafter: AnyDrafter = None
    yes: Yes = False

    @cached_property
    def place(self) -> str | None:
        """The model's folder or repository on this machine; None for the bundled one."""
        return None if self.model is None else find_model(self.model, self.yes)

    @cached_property
    def given_drafter(self) -> str | None:
        """The drafter given; asks before it is downloaded."""
        if self.drafter is None or self.drafter in (AUTO, NO_DRAFTER):
            return self.drafter
        drafter = expand_name(self.drafter)
        ask_for_drafter(drafter, self.yes)
        return drafter

    @cached_property
    def drafter_name(self) -> str | None:
        """The drafter given, or the one chosen for the model; None for the bundled one."""
        if self.place is not None and self._chooses:
            return choose_drafter(self.place, self.drafter, self.yes)
        return None if self.drafter == AUTO else self.given_drafter

    @property
    def _chooses(self) -> bool:
        return self.model is not None and self.drafter in (None, AUTO)

    def load(self, context: int = CONTEXT, kv_bits: int | None = None, **options: Any) -> Loaded:
        """Load the target, its tokenizer and the drafter, if there is memory for a text.

        ``context`` is its number of tokens, and ``kv_bits`` the bits of its K/V entries.
        """
        refuse_none(self.drafter)
        return self._load(self.drafter_name, context, kv_bits, **options)

    def _load(
        self, drafter: str | None, context: int, kv_bits: int | None, **options: Any
    ) -> Loaded:
        """Load a pair; prompt lookup replaces a drafter that was chosen and cannot be loaded."""
        from mlx_redrafter.checkpoints.memory_check import Context
        from mlx_redrafter.machines.leading import target_of
        from mlx_redrafter.target.target import SLOW, is_slow

        group = launched_group()
        try:
            if self.place is not None:
                machines = 1 if group is None else group.size()
                form = Context(context, kv_bits=kv_bits)
                _check_memory(self.place, drafter, form, machines, options.get("adapter_path"))
            model, tokenizer, loaded = mlx_redrafter.load(
                self.place, drafter, group=group, **options
            )
        except RedrafterError as error:
            if isinstance(error, ConfigError) or not self._chooses or drafter in (None, LOOKUP):
                raise
            note(f"drafter: prompt lookup; {error}")
            return self._load(LOOKUP, context, kv_bits, **options)
        if self.model is None:
            _say_bundled(model)
        elif is_slow(target_of(model)):
            note(SLOW)
        return model, tokenizer, mlx_redrafter.Lookup() if loaded is None else loaded


@dataclass(frozen=True)
class AdaptedPair(Pair):
    """A pair whose target may have a LoRA adapter and code of its own."""

    adapter_path: AdapterPath = None
    trust_remote_code: TrustRemoteCode = False

    def _load(
        self, drafter: str | None, context: int, kv_bits: int | None, **options: Any
    ) -> Loaded:
        own = {"adapter_path": self.adapter_path, "trust_remote_code": self.trust_remote_code}
        return super()._load(drafter, context, kv_bits, **{**own, **options})


@dataclass(frozen=True)
class WritingPair(AdaptedPair):
    """A pair that writes a text, with drafts or by plain decoding."""

    drafter: Annotated[str | None, _drafter_option(_NONE)] = None

    @property
    def drafts(self) -> bool:
        return self.drafter != NO_DRAFTER

    def load_writer(
        self, context: int = CONTEXT, kv_bits: int | None = None
    ) -> tuple[nn.Module, TokenizerWrapper, Proposer | None]:
        """Load as `load` does; the drafter is None for plain decoding."""
        name = self.drafter_name if self.drafts else None
        model, tokenizer, drafter = self._load(name, context, kv_bits)
        return model, tokenizer, drafter if self.drafts else None


def _check_memory(
    model: str, drafter: str | None, context: Context, machines: int, adapter: str | None
) -> None:
    """Refuse a model that is too large, and warn about one that is nearly so."""
    from mlx_redrafter.checkpoints.memory_check import check_memory
    from mlx_redrafter.checkpoints.recognition import recognise
    from mlx_redrafter.proposers import WORDS
    from mlx_redrafter.proposers.checkpoint import PATTERNS
    from mlx_redrafter.target.model_loading import find_model

    folder = find_model(model)
    beside = None
    if drafter is not None and drafter not in WORDS:
        recognise(drafter, model)  # refuses what cannot draft before anything is downloaded
        beside = find_checkpoint(drafter, PATTERNS)
        if beside.samefile(folder):
            note("the drafter is the model itself: its drafts cost what they save")
    warning = check_memory(folder, beside, context, machines, adapter)
    if warning is not None:
        typer.echo(warning, err=True)


def _say_bundled(model: nn.Module) -> None:
    size = sum(tensor.size for tensor in named_parameters(model).values())
    note(
        f"no --model given: using the bundled demonstration model ({size / 1e6:.1f}M parameters, "
        "trained on public-domain books); for your own, give --model FOLDER or --model ORG/NAME"
    )


def choose_drafter(model: str, drafter: str | None, yes: bool) -> str:
    """Choose a drafter for a model, print the choice to stderr, and return its name or folder.

    Without ``--drafter`` it must be on this machine and made for the model. ``auto`` also offers a
    published one, which ``yes`` downloads without a question, and a smaller model with the same
    tokens. Last comes a copy of the model in fewer bits, if that is predicted to pay.
    """
    from mlx_redrafter.checkpoints.drafter_search import DrafterSearch, is_auto

    is_auto(drafter)
    search = DrafterSearch.of(model)
    found = search.stored()
    if found is None and drafter == AUTO:
        found = _offer(search, yes) or search.draft_model() or _copy(search)
    if found is not None:
        note(f"drafter: {found.name} ({found.method}; {found.reason})")
        return found.option
    hint = "" if drafter == AUTO else "; --drafter auto also looks for published ones"
    note(f"drafter: prompt lookup; none on this machine is made for {model}{hint}")
    return LOOKUP


def _offer(search: DrafterSearch, yes: bool) -> FoundDrafter | None:
    """Offer a published drafter, and download it if the user agrees."""
    from mlx_redrafter.checkpoints.drafter_search import describe_offer
    from mlx_redrafter.hub import download
    from mlx_redrafter.proposers.checkpoint import PATTERNS

    try:
        offer = search.published()
        for reason in search.reasons:
            note(f"not used: {reason}")
        if offer is None:
            return None
        found, repository = offer
        text = describe_offer(found, repository)
        if yes:
            note(f"downloading {text}")
        elif not (sys.stdin.isatty() and sys.stderr.isatty()):
            note(f"--yes would download {text}")
            return None
        elif not confirm(f"Download {text}?"):
            return None
        download(repository, PATTERNS)
        return found
    except RedrafterError as error:
        note(f"not used: {error}")
        return None


def _copy(search: DrafterSearch) -> FoundDrafter | None:
    from mlx_redrafter.bench.machine import this_chip
    from mlx_redrafter.bench.smaller_copy import find_copy

    return find_copy(search, this_chip())
