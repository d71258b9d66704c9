"""``redrafter-mlx convert``: published drafters in the format of this package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mlx_redrafter.checkpoints.bundled import expand_name
from mlx_redrafter.cli.names import find_model
from mlx_redrafter.cli.text_options import Overwrite
from mlx_redrafter.convert.conversion_options import ConversionOptions

if TYPE_CHECKING:
    from mlx_redrafter.convert.conversion import Conversion


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder or hub repository.")],
    destination: Annotated[
        Path | None,
        typer.Argument(metavar="DST", help="Folder to write; without it, SRC is described."),
    ] = None,
    *,
    options: ConversionOptions,
    to: Annotated[
        Literal["mlx", "pytorch"],
        "Layout to write: mlx, this package's, or pytorch, that of Apple's code, for a drafter in "
        "the mlx layout.",
    ] = "mlx",
    overwrite: Overwrite = False,
    yes: Annotated[bool, "Download the model of --target without a question."] = False,
    upload_repo: Annotated[str | None, "Also upload the result to this hub repository."] = None,
) -> None:
    """Convert a published drafter: recurrent or block, an EAGLE or Medusa head, an MTP module.

    No code in its files runs.
    `redrafter-mlx convert SRC` describes a checkpoint without reading its weights.
    """
    source = expand_name(source)
    if destination is None:
        if (options, to, overwrite, upload_repo) != (ConversionOptions(), "mlx", False, None):
            raise typer.BadParameter("options need a folder to write; add DST")
        _inspect(source)
        return
    from mlx_redrafter.convert.conversion import convert_drafter
    from mlx_redrafter.convert.publication import check_output

    if to == "mlx":
        if options.target is not None:
            check_output(destination, source, options.target, overwrite=overwrite)
            options = replace(options, target=find_model(options.target, yes))
        _report(convert_drafter(source, destination, options, overwrite), destination, options)
    elif options == ConversionOptions(options.dtype):
        from mlx_redrafter.convert.export import export_drafter

        notes = export_drafter(source, destination, options.dtype, overwrite)
        typer.echo(f"wrote {destination} in the layout of Apple's PyTorch code")
        for note in notes:
            typer.echo(f"note: {note}", err=True)
    else:
        raise typer.BadParameter(
            "--to pytorch takes no option but --dtype, --overwrite and --upload-repo"
        )
    if upload_repo is not None:
        from mlx_redrafter.convert.publication import upload_folder

        typer.echo(f"uploaded to {upload_folder(destination, upload_repo)}")


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


def _inspect(path_or_repo: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from mlx_redrafter.convert.recognition import inspect_checkpoint

    inspection = inspect_checkpoint(path_or_repo)
    source, console = inspection.source, Console(markup=False, emoji=False, highlight=False)
    console.print(f"{source.name}: {inspection.kind}")
    console.print(f"files: {', '.join(path.name for path in source.files)}")
    if inspection.config is not None:
        for key, value in inspection.config.to_dict().items():
            console.print(f"  {key}: {value}")
    for note in inspection.notes:
        console.print(f"note: {note}")
    table = Table("tensor", "dtype", "shape", box=None)
    for name, tensor in sorted(source.tensors.items()):
        table.add_row(ascii(name)[1:-1], tensor.dtype, str(list(tensor.shape)))
    console.print(table)
