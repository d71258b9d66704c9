"""Print the computed cost of training on a million tokens, by model and chip, as Markdown."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import typer

from mlx_redrafter.bench.lab.training_table import render_table


def add_options(parser: ArgumentParser) -> None:
    """Add no options."""


def run(arguments: Namespace) -> None:
    """Run the command."""
    typer.echo(render_table())
