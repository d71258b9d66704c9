"""``redrafter-mlx bench predraft``: drafts made ahead on machines with a second engine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from mlx_redrafter.cli.bench_options import Out
from mlx_redrafter.cli.bench_output import parse_shares, show
from mlx_redrafter.errors import ConfigError


def predraft(
    hits: Annotated[
        str, typer.Option(help="Shares of the outcomes that are drafted for.")
    ] = "0.6,0.8,0.9",
    verify: Annotated[
        float | None,
        typer.Option(help="Verifying a chain, in plain steps.", show_default="several cases"),
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(help="Drafting a token, in plain steps.", show_default="several cases"),
    ] = None,
    accepted: Annotated[
        str, typer.Option(help="Share of drafts accepted, for states 0, 1, ... tokens old.")
    ] = "0.75",
    length: Annotated[int, typer.Option(help="Beam length of the chain, root included.")] = 5,
    recurrent: Annotated[
        bool, typer.Option("--recurrent", help="Drafts made ahead follow from an old state.")
    ] = False,
    out: Out = None,
) -> None:
    """Compute what drafts made ahead would gain with a second engine. Nothing is measured.

    Some cases, or the one of --verify and --level.
    """
    from mlx_redrafter.bench.predraft import PAIRINGS, Pairing, simulate_predrafts
    from mlx_redrafter.bench.result_file import new_result, write_result

    if (verify is None) != (level is None):
        raise ConfigError("--verify and --level belong together; give both or neither")
    pairings: tuple[Pairing, ...] = PAIRINGS
    if verify is not None and level is not None:
        shares = parse_shares(accepted)
        pairings = (Pairing("given", verify, level, length, shares, recurrent),)
    rates = parse_shares(hits)
    found = simulate_predrafts(pairings, rates)
    columns = ("pair", "without", "drafting ahead on", *(f"hits {rate:.0%}" for rate in rates))
    title = "without: by plain decoding; with: by without"
    table = Table(*columns, title=title, title_justify="left")
    for one in found:
        gains = (f"{gain - 1:+.0%}" for gain in one.gains.values())
        table.add_row(one.pairing, f"{one.speed:.2f}", one.engine, *gains)
    show(table)
    if out is not None:
        write_result(out, new_result("predraft", {"hits": list(rates)}, found=found))
