"""``redrafter-mlx convert``: published drafters in the format of this package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mlx_redrafter.cli.typer_app import Application, Command, CommandGroup
from mlx_redrafter.convert.conversion_options import ConversionOptions, Dtype

if TYPE_CHECKING:
    from mlx_redrafter.convert.output import Conversion
    from mlx_redrafter.convert.recognition import Inspection

# Name of the command that converts, which users need not type.
DEFAULT_COMMAND = "run"


SourceArgument = Annotated[str, typer.Argument(metavar="SRC", help="Folder or hub repository.")]
DestinationArgument = Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")]


Layout = Literal["mlx", "pytorch"]


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
    options: ConversionOptions,
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

    if to == "mlx":
        _report(convert_drafter(source, destination, options), destination, options)
    elif options == ConversionOptions(options.dtype):
        _export(source, destination, options.dtype)
    else:
        raise typer.BadParameter("--to pytorch takes no option but --dtype and --upload-repo")
    if upload_repo is not None:
        from mlx_redrafter.convert.publication import upload_folder

        typer.echo(f"uploaded to {upload_folder(destination, upload_repo)}")


@app.command("inspect")
def inspect_source(
    source: SourceArgument,
) -> None:
    """Describe a checkpoint without converting it or reading its weights."""
    from mlx_redrafter.convert.recognition import inspect_checkpoint

    _show(inspect_checkpoint(source))


def _export(source: str, destination: Path, dtype: Dtype | None) -> None:
    from mlx_redrafter.convert.export import export_drafter

    notes = export_drafter(source, destination, dtype)
    typer.echo(f"wrote {destination} in the layout of Apple's PyTorch code")
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _report(conversion: Conversion, destination: Path, options: ConversionOptions) -> None:
    provenance = conversion.provenance
    typer.echo(f"wrote {destination}: {conversion.config.summary}, {options.stored_as}")
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
