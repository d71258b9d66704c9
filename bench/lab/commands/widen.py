"""Widen a small Llama by zero-padded growth: it computes the same, at the cost of a large model.

Text and acceptance are the small model's, for speed work.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import typer

from mlx_redrafter.bench.lab.widen import widen_drafter, widen_target
from mlx_redrafter.checkpoint_files import find_checkpoint
from mlx_redrafter.cli.bench_output import parse_count
from mlx_redrafter.convert.publication import check_output
from mlx_redrafter.errors import ConfigError


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("source", help="small Llama")
    parser.add_argument("destination", type=Path, help="folder to write")
    parser.add_argument("--parameters", default="0.2B", help="approximate size of the copy")
    parser.add_argument("--layers", type=int, help="layers of the copy; added ones do nothing")
    parser.add_argument("--drafter", help="recurrent drafter made for the small model")
    parser.add_argument("--drafter-out", type=Path, help="folder for the drafter's copy")


def run(arguments: Namespace) -> None:
    """Run the command."""
    destination = arguments.destination
    drafter, drafter_out = arguments.drafter, arguments.drafter_out
    if (drafter is None) != (drafter_out is None):
        raise ConfigError("--drafter and --drafter-out belong together; give both or neither")
    count = parse_count(arguments.parameters)
    if drafter is not None:  # before the long work
        check_output(drafter_out, find_checkpoint(drafter))
        if drafter_out.resolve() == destination.resolve():
            raise ConfigError(f"expected two folders to write, got {drafter_out} twice")
    shape = widen_target(arguments.source, destination, count, arguments.layers)
    typer.echo(f"{destination}: {shape.num_parameters / 1e6:.1f}M parameters, {shape}")
    if drafter is None:
        return
    config = widen_drafter(drafter, drafter_out, shape.hidden_size)
    typer.echo(f"{drafter_out}: {config}")
