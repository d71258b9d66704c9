"""``redrafter-mlx convert``: published drafters in the format of this package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mlx_redrafter.cli.typer_app import Application, Command, CommandGroup

if TYPE_CHECKING:
    from mlx_redrafter.convert.conversion_options import (
        Conversion,
        ConversionOptions,
        Quantization,
        VocabularySlice,
    )
    from mlx_redrafter.convert.inspection import Inspection

# Name of the command that converts, which users need not type.
DEFAULT_COMMAND = "run"


SourceArgument = Annotated[str, typer.Argument(metavar="SRC", help="Folder or hub repository.")]
DestinationArgument = Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")]


Dtype = Literal["float16", "bfloat16", "float32"]
Layout = Literal["mlx", "pytorch"]
Recurrence = Literal["silu", "identity"]
TreeKind = Literal["dynamic", "static"]


@dataclass(frozen=True)
class QuantizationOptions:
    """Quantization of the result."""

    quantize: Annotated[bool, typer.Option("-q", "--quantize", help="Quantize the weights.")] = (
        False
    )
    q_bits: Annotated[int, typer.Option(help="Bits per weight: 2, 3, 4, 6 or 8.")] = 4
    q_group_size: Annotated[int, typer.Option(help="Weights per group: 32, 64 or 128.")] = 64

    def read(self) -> Quantization | None:
        """Return the quantization, or None if the weights are not quantised."""
        from mlx_redrafter.convert.conversion_options import Quantization

        return Quantization(self.q_bits, self.q_group_size) if self.quantize else None


@dataclass(frozen=True)
class VocabularyOptions:
    """The target, and the tokens that the drafter can propose."""

    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model that the drafter is for: also check that they fit, and measure how many "
            "first drafts the model accepts.",
        ),
    ] = None
    vocab_slice: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Draft only the N most frequent tokens of --vocab-text, which makes drafting "
            "faster (recurrent drafters and Medusa heads).",
        ),
    ] = None
    vocab_text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text like the text to be generated; may be repeated."),
    ] = None

    def __post_init__(self) -> None:
        if (self.vocab_slice is None) != (not self.vocab_text):
            raise typer.BadParameter("--vocab-slice and --vocab-text need each other")
        if self.vocab_slice is not None and self.target is None:
            raise typer.BadParameter(
                "--vocab-slice needs --target, whose tokenizer counts the tokens"
            )

    def read(self) -> VocabularySlice | None:
        """Return the reduced vocabulary, or None if the drafter can propose every token."""
        from mlx_redrafter.convert.conversion_options import VocabularySlice

        if self.vocab_slice is None:
            return None
        return VocabularySlice(self.vocab_slice, tuple(self.vocab_text or ()))


class DefaultContext(typer.Context):
    """A call of the default command, shown without its name."""

    @property
    def command_path(self) -> str:
        """The command as users type it."""
        assert self.parent is not None
        return self.parent.command_path


class DefaultCommand(Command):
    """The command that runs if the first word names no command."""

    context_class = DefaultContext


class ConvertGroup(CommandGroup):
    """A group that converts unless the first word names a command: ``convert SRC DST``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Add the name of the default command if the first word names none."""
        if not args or args[0] not in self.commands:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


app = Application(
    cls=ConvertGroup,
    help="Convert a published drafter: recurrent or block, an EAGLE or Medusa head, an MTP module.",
)


@app.command(DEFAULT_COMMAND, cls=DefaultCommand)
def convert(
    source: SourceArgument,
    destination: DestinationArgument,
    *,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Dtype of the weights. By default float16; with --to pytorch, the stored dtype.",
            show_default=False,
        ),
    ] = None,
    quantization: QuantizationOptions,
    vocabulary: VocabularyOptions,
    rnn_activation: Annotated[
        Recurrence | None,
        typer.Option(
            help="Activation of the RNN, if the converter cannot infer it from the weights' origin."
        ),
    ] = None,
    tree: Annotated[
        TreeKind | None,
        typer.Option(
            help="Tree of Medusa heads: dynamic chooses the most probable drafts in every step, "
            "static the same ranks in every step, measured with --target."
        ),
    ] = None,
    to: Annotated[
        Layout,
        typer.Option(
            help="Layout to write: mlx, this package's, or pytorch, that of Apple's code, for a "
            "drafter in the mlx layout."
        ),
    ] = "mlx",
    upload_repo: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Also upload the result to this hub repository."),
    ] = None,
) -> None:
    """Convert a published drafter: recurrent or block, an EAGLE or Medusa head, an MTP module.

    No code in its files runs.
    `redrafter-mlx convert inspect SRC` describes a checkpoint without converting it.
    """
    from mlx_redrafter.convert.conversion import convert_drafter
    from mlx_redrafter.convert.conversion_options import ConversionOptions

    if to == "pytorch":
        if quantization.quantize or vocabulary.target or rnn_activation or tree:
            raise typer.BadParameter("--to pytorch takes no option but --dtype and --upload-repo")
        _export(source, destination, dtype)
    else:
        options = ConversionOptions(
            dtype=dtype or "float16",
            quantization=quantization.read(),
            target=vocabulary.target,
            rnn_activation=rnn_activation,
            vocabulary=vocabulary.read(),
            tree=tree,
        )
        _report(convert_drafter(source, destination, options), destination, options)
    if upload_repo is not None:
        from mlx_redrafter.convert.publication import upload_folder

        typer.echo(f"uploaded to {upload_folder(destination, upload_repo)}")


@app.command("inspect")
def inspect_source(
    source: SourceArgument,
) -> None:
    """Describe a checkpoint without converting it or reading its weights."""
    from mlx_redrafter.convert.inspection import inspect_checkpoint

    _show(inspect_checkpoint(source))


def _export(source: str, destination: Path, dtype: Dtype | None) -> None:
    from mlx_redrafter.convert.export import export_drafter

    notes = export_drafter(source, destination, dtype)
    typer.echo(f"wrote {destination} in the layout of Apple's PyTorch code")
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _report(conversion: Conversion, destination: Path, options: ConversionOptions) -> None:
    provenance = conversion.provenance
    stored_as = options.quantization or options.dtype
    typer.echo(f"wrote {destination}: {conversion.config.summary}, {stored_as}")
    if (measured := provenance["self_test"]) is not None:
        typer.echo(
            f"first drafts accepted: {measured['acceptance']:.1%} of {measured['positions']} "
            f"by {provenance['target']}"
        )
    for note in provenance["notes"]:
        typer.echo(f"note: {note}", err=True)
    for warning in conversion.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _show(inspection: Inspection) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    source = inspection.source
    console.print(Text(f"{source.name}: {inspection.kind}"))
    console.print(Text(f"files: {', '.join(path.name for path in source.files)}"))
    if inspection.config is not None:
        for key, value in inspection.config.to_dict().items():
            console.print(Text(f"  {key}: {value}"))
    for note in inspection.notes:
        console.print(Text(f"note: {note}"))
    table = Table("tensor", "dtype", "shape", box=None)
    for name, tensor in sorted(source.tensors.items()):
        table.add_row(Text(ascii(name)[1:-1]), tensor.dtype, Text(str(list(tensor.shape))))
    console.print(table)
