"""``redrafter-mlx bench``: measurements on this machine."""

from __future__ import annotations

from mlx_redrafter.cli.bench_compare import compare, sweep
from mlx_redrafter.cli.bench_speed import share, speed, throughput
from mlx_redrafter.cli.typer_app import Application

app = Application(help="Measure the speed of drafting on this machine.", no_args_is_help=True)
app.command()(speed)
app.command()(share)
app.command()(compare)
app.command()(sweep)
app.command()(throughput)
