"""Draw results of ``heads`` into one plot: speed over tokens of training, a curve per kind."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from mlx_redrafter.bench.lab.heads_plot import plot_results
from mlx_redrafter.cli.bench_output import draw


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("plot", type=Path, help="PNG file to write")
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of one target")


def run(arguments: Namespace) -> None:
    """Run the command."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.results]
    draw(lambda: [plot_results(arguments.plot, results)])
