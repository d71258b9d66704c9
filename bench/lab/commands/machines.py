"""Several ranks on this machine: how they end, and what delayed messages cost.

Without a C compiler the ring waits in a busy loop, and messages cannot be delayed.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

import typer

from mlx_redrafter.bench.lab.machine_delays import plot_delays, time_with_delay
from mlx_redrafter.bench.lab.machine_ends import EVENTS, End, end_by, kill_at_random
from mlx_redrafter.bench.lab.options import at_least
from mlx_redrafter.bench.result_file import write_result
from mlx_redrafter.cli.bench_output import draw


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", required=True, help="Folder of a model that mlx-lm can split.")
    parser.add_argument("--ranks", type=at_least(2), default=2, help="Number of ranks.")
    parser.add_argument("--ends", action="store_true", help="Try every event that ends ranks.")
    parser.add_argument("--kills", type=at_least(0), default=0, help="Random kills to try.")
    parser.add_argument("--delays", default="", help="Delays of messages in ms, such as 0,0.5,1.")
    parser.add_argument("--drafter", help="Drafter for --delays; the model itself by default.")
    parser.add_argument("--out", type=Path, help="JSON file for the result.")


def run(options: Namespace) -> None:
    """Run the chosen experiments, and print a line for each result."""
    ends: list[End] = []
    for event in EVENTS if options.ends else ():
        ends.append(end_by(event, options.model, options.ranks))
        _print(asdict(ends[-1]))
    for number in range(options.kills):
        ends.append(kill_at_random(number, options.model, options.ranks))
        _print(asdict(ends[-1]))
    drafter = options.drafter or options.model
    times = []
    for delay in map(float, filter(None, options.delays.split(","))):
        times.append(time_with_delay(options.model, drafter, options.ranks, delay))
        _print(dict(times[-1]))
    if options.out is not None:
        write_result(options.out, {"ends": [asdict(one) for one in ends], "delays": times})
        if times:
            path = options.out.with_suffix(".png")
            draw(lambda: [plot_delays(path, times, f"{options.ranks} ranks on one machine")])
    left = sum(one.left for one in ends)
    if left or any(not one["is_equal"] for one in times):
        typer.echo(f"{left} ranks were left behind, or a text differs", err=True)
        raise typer.Exit(1)


def _print(found: dict[str, object]) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
