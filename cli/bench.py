"""``redrafter-mlx bench``: measurements on this machine, and the tools they need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_caches import caches
from mlx_redrafter.cli.bench_endurance import endurance
from mlx_redrafter.cli.bench_guard import guard
from mlx_redrafter.cli.bench_heads import heads
from mlx_redrafter.cli.bench_output import parse_count
from mlx_redrafter.cli.bench_parts import memory, overhead, profile
from mlx_redrafter.cli.bench_predict import predict, training
from mlx_redrafter.cli.bench_predraft import predraft
from mlx_redrafter.cli.bench_regret import regret, simulate
from mlx_redrafter.cli.bench_requests import copy, request
from mlx_redrafter.cli.bench_serving import serving
from mlx_redrafter.cli.bench_speed import compare, sweep
from mlx_redrafter.cli.bench_throughput import throughput
from mlx_redrafter.cli.typer_app import Application
from mlx_redrafter.errors import ConfigError

app = Application(
    help="Measure what drafting gains here, and where the time goes.", no_args_is_help=True
)
app.command()(sweep)
app.command()(compare)
app.command()(heads)
app.command()(guard)
app.command()(regret)
app.command()(simulate)
app.command()(profile)
app.command()(predict)
app.command()(training)
app.command()(predraft)
app.command()(overhead)
app.command()(memory)
app.command()(caches)
app.command()(endurance)
app.command()(throughput)
app.command()(serving)
app.command()(request)
app.command()(copy)


@app.command()
def widen(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Small Llama.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    parameters: Annotated[
        str, typer.Option(help="Approximate size of the copy, such as 0.2B or 150M.")
    ] = "0.2B",
    layers: Annotated[
        int | None, typer.Option(help="Layers of the copy; new ones add nothing.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter or head made for the small model.")
    ] = None,
    drafter_out: Annotated[Path | None, typer.Option(help="Folder for the drafter's copy.")] = None,
    drafter_exit_dim: Annotated[
        int | None,
        typer.Option(help="Width of the copied drafter's head.", show_default="the drafter's own"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Context of the copy, in tokens; a longer one changes RoPE's base."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the arbitrary weights.")] = 0,
) -> None:
    """Widen a small Llama by zero-padded growth: it computes the same, at a large model's cost.

    Text and acceptance are the small model's, for speed work. Only a context longer than the small
    model's changes the text, so that it goes on meaning something.
    """
    if (drafter is None) != (drafter_out is None):
        raise ConfigError("--drafter and --drafter-out belong together; give both or neither")
    check_int("seed", seed, 0)
    for name, value in (("context", context), ("drafter_exit_dim", drafter_exit_dim)):
        if value is not None:
            check_int(name, value, 1)
    count = parse_count(parameters)
    from mlx_redrafter.bench.widen import widen_drafter, widen_target
    from mlx_redrafter.bench.widen_heads import widen_head
    from mlx_redrafter.checkpoint_files import find_checkpoint
    from mlx_redrafter.checkpoints.recognition import recognise
    from mlx_redrafter.convert.publication import check_new

    if drafter is not None and drafter_out is not None:  # before the long work
        check_new(drafter_out, find_checkpoint(drafter))
        if drafter_out.resolve() == destination.resolve():
            raise ConfigError(f"DST and --drafter-out must be two folders, got {drafter_out} twice")
    shape = widen_target(source, destination, count, layers, context, seed)
    typer.echo(f"{destination}: {shape.num_parameters / 1e6:.1f}M parameters, {shape}")
    if drafter is not None and drafter_out is not None:
        kind, _ = recognise(drafter)
        if kind.NAME == "recurrent drafter":
            config = widen_drafter(drafter, drafter_out, shape.hidden_size, drafter_exit_dim, seed)
            typer.echo(f"{drafter_out}: {config}")
        else:
            widen_head(kind.NAME, drafter, drafter_out, shape.hidden_size)
            typer.echo(f"{drafter_out}: {kind.NAME}")
