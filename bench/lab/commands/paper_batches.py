"""Measure the batch tables of ReDrafter and SpecFormer on one target."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from mlx_redrafter.bench.lab import paper_batches


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("heads", type=Path, help="JSON: the target, and heads by name")
    parser.add_argument("out", type=Path, help="folder for the page, the plot and the JSON")
    parser.add_argument("--minutes", type=float, default=25.0, help="begin no cell afterwards")
    parser.add_argument("--steps", type=int, default=16, help="timed steps of a cell at least")
    parser.add_argument(
        "--most", type=int, default=64, help="largest batch; 0 counts saved nodes only"
    )


def run(arguments: Namespace) -> None:
    """Run the command."""
    paper_batches.run(
        arguments.heads, arguments.out, arguments.minutes, arguments.steps, arguments.most
    )
