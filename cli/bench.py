"""``redrafter-mlx bench``: a comparison on this machine, and predictions for other chips."""

from __future__ import annotations

from mlx_redrafter.cli.bench_compare import compare
from mlx_redrafter.cli.bench_predict import predict
from mlx_redrafter.cli.typer_app import Application

app = Application(
    help="Measure the speed of drafting on this machine, or predict it for another chip.",
    no_args_is_help=True,
)
app.command()(compare)
app.command()(predict)
