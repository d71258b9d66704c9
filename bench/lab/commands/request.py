"""Measure the work before the first token of a request, without prompt and tokenizer."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.table import Table

from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
from mlx_redrafter.bench.lab.options import add_out, add_pair, at_least, describe_pair, load_pair
from mlx_redrafter.bench.lab.request import measure_request
from mlx_redrafter.bench.lab.rounds import scaled
from mlx_redrafter.bench.result_file import new_result, write_result
from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.cli.bench_output import progress, show, warn

REQUEST_PROMPT = [1, 2, 3]


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    parser.add_argument("--rounds", type=at_least(1), default=50, help="samples of each number")
    add_out(parser)


def run(arguments: Namespace) -> None:
    """Run the command."""
    target, tokenizer, drafter = load_pair(arguments)
    watch, rounds = LoadWatch(), arguments.rounds
    with progress("Rounds") as on_progress:
        found = measure_request(target, tokenizer, drafter, REQUEST_PROMPT, rounds, on_progress)
    tensors = len(named_parameters(target))
    table = Table("work before the prefill", "ms", "interval", title=f"{tensors} tensors")
    for name, seconds in found.items():
        table.add_row(name, f"{1e3 * seconds.median:.2f}", scaled(seconds, 1e3).span())
    show(table)
    warn(disturbances := find_disturbances(watch.others()))
    if arguments.out is not None:
        configuration = {**describe_pair(arguments, drafter), "rounds": rounds, "tensors": tensors}
        result = new_result("request", configuration, found=found, disturbances=disturbances)
        write_result(arguments.out, result)
