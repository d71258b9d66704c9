"""Validate the cost model of predictions on Apple's sweeps of three chips.

The exit code is 1 if the errors are above their bounds.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import typer

from mlx_redrafter.bench.lab.options import add_out
from mlx_redrafter.bench.lab.validation import LeftOut, leave_one_out, read_apple_sweeps
from mlx_redrafter.bench.result_file import new_result, write_result
from mlx_redrafter.cli.bench_output import show_lines

# Maximum median error of the step time, as a share of the measured time.
MAX_ERROR = 0.15
# Minimum share of the best measured speedup that the predicted best shape has.
MIN_SHARE = 0.95


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("sweeps", type=Path, help="folder of Apple's sweeps")
    add_out(parser)


def run(arguments: Namespace) -> None:
    found = leave_one_out(read_apple_sweeps(arguments.sweeps))
    title = "step time, predicted from the other two chips and the chip's plain decoding"
    show_lines(_errors_table(found), title)
    overall = median(abs(error) for one in found for error in one.errors)
    worst = min(best.share for one in found for best in one.best)
    typer.echo(
        f"median error of step time {overall:.1%} (bound {MAX_ERROR:.0%}); the predicted best "
        f"shape reaches at least {worst:.1%} of the best measured speedup (bound {MIN_SHARE:.0%})"
    )
    if arguments.out is not None:
        write_result(arguments.out, new_result("predict validation", {}, found=found))
    if overall > MAX_ERROR or worst < MIN_SHARE:
        raise typer.Exit(1)


def _errors_table(found: Sequence[LeftOut]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("chip", "rows", "median error", "median, signed", "largest")]
    for one in found:
        largest = max(one.errors, key=abs)
        shares = f"{one.median_error:.1%}", f"{median(one.errors):+.1%}", f"{largest:+.1%}"
        table.append((one.chip, str(len(one.errors)), *shares))
    return table
