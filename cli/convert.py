"""`redrafter-mlx convert`: published drafters, made loadable here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_redrafter.cli.convert_options import (
    Destination,
    Dtype,
    Layout,
    QuantizationOptions,
    Recurrence,
    Source,
    TreeKind,
    VocabularyOptions,
)
from mlx_redrafter.cli.result_records import takes_records
from mlx_redrafter.cli.typer_app import Application, Command, Group

if TYPE_CHECKING:
    from mlx_redrafter.convert.conversion_options import Conversion, ConversionOptions
    from mlx_redrafter.convert.inspection import Inspection

DEFAULT_COMMAND = "run"


class DefaultContext(typer.Context):
    """A call of the default command, whose name nobody types."""

    @property
    def command_path(self) -> str:
        """The command as it is called."""
        assert self.parent is not None
        return self.parent.command_path


class DefaultCommand(Command):
    """The command that runs where none is named."""

    context_class = DefaultContext


class ConvertGroup(Group):
    """Converts unless the first word names another command: ``convert SRC DST``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Add the name of the default command where none is given."""
        if not args or args[0] not in self.commands:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


app = Application(
    cls=ConvertGroup,
    help="Convert a published drafter: recurrent, an EAGLE head, Medusa heads or an MTP module.",
)


@app.command(DEFAULT_COMMAND, cls=DefaultCommand)
@takes_records
def convert(
    source: Source,
    destination: Destination,
    *,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Dtype of the weights: float16, or as stored with --to pytorch."),
    ] = None,
    quantization: QuantizationOptions,
    vocabulary: VocabularyOptions,
    rnn_activation: Annotated[
        Recurrence | None,
        typer.Option(help="Activation of the RNN, if the origin of the weights does not tell."),
    ] = None,
    tree: Annotated[
        TreeKind | None,
        typer.Option(
            help="Drafts of Medusa heads: by their probabilities at each step, or the same ranks "
            "at every step, measured with --target."
        ),
    ] = None,
    to: Annotated[
        Layout, typer.Option(help="Layout to write; pytorch: Apple's, from MLX.")
    ] = Layout.MLX,
    upload_repo: Annotated[
        str | None, typer.Option(metavar="REPO", help="Upload the result to the hub.")
    ] = None,
) -> None:
    """Make a drafter loadable here; nothing in its files is ever executed.

    `redrafter-mlx convert inspect SRC` describes a checkpoint without converting it.
    """
    from mlx_redrafter.convert.conversion import convert_drafter
    from mlx_redrafter.convert.conversion_options import ConversionOptions

    if to is Layout.PYTORCH:
        if quantization.quantize or vocabulary.target or rnn_activation or tree:
            raise typer.BadParameter("--to pytorch takes no option but --dtype and --upload-repo")
        _export(source, destination, dtype)
    else:
        options = ConversionOptions(
            dtype=(dtype or Dtype.FLOAT16).value,
            quantization=quantization.read(),
            target=vocabulary.target,
            rnn_activation=None if rnn_activation is None else rnn_activation.value,
            vocabulary=vocabulary.read(),
            tree=None if tree is None else tree.value,
        )
        _report(convert_drafter(source, destination, options), destination, options)
    if upload_repo is not None:
        from mlx_redrafter.convert.upload import upload_folder

        typer.echo(f"uploaded to {upload_folder(destination, upload_repo)}")


@app.command("inspect")
def inspect_source(
    source: Source,
) -> None:
    """Describe a checkpoint, without converting it or reading its values."""
    from mlx_redrafter.convert.inspection import inspect_checkpoint

    _show(inspect_checkpoint(source))


def _export(source: str, destination: Path, dtype: Dtype | None) -> None:
    from mlx_redrafter.convert.export import export_drafter

    notes = export_drafter(source, destination, None if dtype is None else dtype.value)
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
