"""Regenerate the tables of the results pages; drop from the result files what no table reads."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from mlx_redrafter.bench.lab.tables import reduce_results, write_pages


def add_options(parser: ArgumentParser) -> None:
    """Add no options."""


def run(arguments: Namespace) -> None:
    """Run the command."""
    reduce_results()
    write_pages()
