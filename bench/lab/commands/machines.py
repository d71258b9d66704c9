"""Several ranks on this machine: how they end, and what delayed messages cost.

Without a C compiler the ring waits in a busy loop, and messages cannot be delayed.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from mlx_redrafter.bench.lab.machine_ends import EVENTS, SCRIPT, end_by, kill_at_random
from mlx_redrafter.bench.lab.options import at_least
from mlx_redrafter.bench.lab.ranks import started
from mlx_redrafter.bench.plots import figure
from mlx_redrafter.bench.result_file import write_result
from mlx_redrafter.cli.bench_output import draw
from mlx_redrafter.errors import ResourceError

# Seconds that the texts with one delay may take.
LIMIT = 600.0


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="Folder of a model that mlx-lm can split.")
    parser.add_argument("--ranks", type=at_least(2), default=2, help="Number of ranks.")
    parser.add_argument("--ends", action="store_true", help="Try every event that ends ranks.")
    parser.add_argument("--kills", type=at_least(0), default=0, help="Random kills to try.")
    parser.add_argument("--delays", default="", help="Delays of messages in ms, such as 0,0.5,1.")
    parser.add_argument("--drafter", help="Drafter for --delays; the model itself by default.")
    parser.add_argument("--out", type=Path, help="JSON file for the result.")


def run(options: Namespace) -> None:
    """Run the chosen experiments, and print a line for each result."""
    model, size = options.model, options.ranks
    ends = [_show(asdict(end_by(one, model, size))) for one in (EVENTS if options.ends else ())]
    ends += [_show(asdict(kill_at_random(i, model, size))) for i in range(options.kills)]
    drafter, delays = options.drafter or model, filter(None, options.delays.split(","))
    times = [_show(_time_with_delay(model, drafter, size, float(delay))) for delay in delays]
    if options.out is not None:
        write_result(options.out, {"ends": ends, "delays": times})
        if times:
            draw(lambda: [_plot(options.out.with_suffix(".png"), times, size)])
    left = sum(one["left"] for one in ends)
    if left or any(not one["is_equal"] for one in times):
        typer.echo(f"{left} ranks were left behind, or a text differs", err=True)
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> dict[str, Any]:
    """Print a result as a line of JSON, and return it."""
    print(json.dumps(found), flush=True)
    return found


def _time_with_delay(model: str, drafter: str, size: int, delay: float) -> dict[str, Any]:
    """Time texts over local ranks, every message of which is sent ``delay`` ms later."""
    arguments = ["-m", SCRIPT, "time", model, drafter]
    with started(arguments, size, RING_DELAY_US=str(round(1e3 * delay))) as ranks:
        ended = ranks.wait(LIMIT)
    if any(one.code for one in ended):
        raise ResourceError(f"expected times, found {ended[0].out[-200:]!r}; look at its cause")
    return {"delay_ms": delay, **json.loads(ended[0].out.splitlines()[-1])}


def _plot(path: Path, found: Sequence[dict[str, Any]], size: int) -> Path:
    """Draw milliseconds per token, plain and drafted, against the delay."""
    delays = [one["delay_ms"] for one in found]
    drafted = [one["drafted_ms"] / one["tokens_per_step"] for one in found]
    with figure(path, f"{size} ranks on one machine") as axes:
        axes.plot(delays, [one["plain_ms"] for one in found], marker="o", label="plain")
        axes.plot(delays, drafted, marker="o", label="drafted")
        axes.set_xlabel("delay of every message, ms")
        axes.set_ylabel("ms per token")
        axes.set_ylim(bottom=0)
        axes.legend()
    return path
