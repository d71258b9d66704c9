"""Compute the gain of speculative speculative decoding with a second engine; nothing is measured.

It computes several typical pairs, or the one given by --verify and --level.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.table import Table

from mlx_redrafter.bench.lab.options import add_out, parse_shares
from mlx_redrafter.bench.lab.predraft import PAIRINGS, Pairing, simulate_predrafts
from mlx_redrafter.bench.result_file import new_result, write_result
from mlx_redrafter.cli.bench_output import show
from mlx_redrafter.errors import ConfigError


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--hits", default="0.6,0.8,0.9", help="shares of outcomes drafted for")
    parser.add_argument("--verify", type=float, help="cost of verifying a chain, in plain steps")
    parser.add_argument("--level", type=float, help="cost of drafting a token, in plain steps")
    parser.add_argument(
        "--accepted", default="0.75", help="acceptance with drafter states 0, 1, ... tokens old"
    )
    parser.add_argument("--length", type=int, default=5, help="beam length of the chain")
    parser.add_argument(
        "--recurrent", action="store_true", help="early drafts start from an old state"
    )
    add_out(parser)


def run(arguments: Namespace) -> None:
    """Run the command."""
    verify, level = arguments.verify, arguments.level
    if (verify is None) != (level is None):
        raise ConfigError("--verify and --level belong together; give both or neither")
    pairings: tuple[Pairing, ...] = PAIRINGS
    if verify is not None:
        shares = parse_shares(arguments.accepted)
        given = Pairing("given", verify, level, arguments.length, shares, arguments.recurrent)
        pairings = (given,)
    rates = parse_shares(arguments.hits)
    found = simulate_predrafts(pairings, rates)
    columns = ("pair", "without", "second engine", *(f"hits {rate:.0%}" for rate in rates))
    title = "without: speed by plain decoding's; hits: gain over without"
    table = Table(*columns, title=title, title_justify="left")
    for one in found:
        gains = (f"{gain - 1:+.0%}" for gain in one.gains.values())
        table.add_row(one.pairing, f"{one.speed:.2f}", one.engine, *gains)
    show(table)
    if arguments.out is not None:
        write_result(arguments.out, new_result("predraft", {"hits": list(rates)}, found=found))
