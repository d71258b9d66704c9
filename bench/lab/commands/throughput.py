"""Compare batch generation by mlx-lm, plain decoding, the default and fixed draft shapes.

The file is written after each batch size. The exit code is 1 if a text differs from the target's
own.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from rich.table import Table

from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
from mlx_redrafter.bench.lab.figures import draw, title
from mlx_redrafter.bench.lab.options import (
    add_out,
    add_pair,
    add_prompts,
    add_sampling,
    at_least,
    describe_pair,
    load_pair,
    make_settings,
    parse_ints,
    read_given_prompts,
)
from mlx_redrafter.bench.lab.plots import plot_throughput
from mlx_redrafter.bench.lab.throughput import Throughput, measure_throughput
from mlx_redrafter.bench.prompts import describe_prompts
from mlx_redrafter.bench.result_file import new_result, write_result
from mlx_redrafter.cli.bench_output import parse_shapes, progress, refuse_texts, show, warn


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    add_prompts(parser)
    parser.add_argument("--batch-sizes", default="1,2,4,8,16", help="sequences in a batch")
    parser.add_argument("--shapes", default="1x5,2x5,4x5", help="WIDTHxLENGTH or with xNODES")
    parser.add_argument("-m", "--max-tokens", type=at_least(1), default=64)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="batches of each size")
    add_sampling(parser)
    add_out(parser)


def run(arguments: Namespace) -> None:
    """Run the command."""
    sizes, plans = parse_ints(arguments.batch_sizes), parse_shapes(arguments.shapes)
    target, tokenizer, drafter = load_pair(arguments)
    encoded = read_given_prompts(arguments, tokenizer)
    settings = make_settings(arguments, target, tokenizer, drafter)
    watch, out, rounds = LoadWatch(), arguments.out, arguments.rounds
    configuration = {
        **describe_pair(arguments, drafter),
        **describe_prompts(arguments.prompts, encoded),
        "max_tokens": arguments.max_tokens,
        "rounds": rounds,
        "temp": arguments.temp,
    }
    result = new_result("throughput", configuration)

    def keep(found: Sequence[Throughput]) -> None:
        result.update(found=found, disturbances=find_disturbances(watch.others()))
        if out is not None:
            write_result(out, result)

    with progress("Rounds") as on_progress:
        found = measure_throughput(settings, plans, encoded, sizes, rounds, on_progress, keep)
    show(_table(found))
    warn(result["disturbances"])
    if out is not None:
        heading = title(result, target)
        draw(lambda: [plot_throughput(out.with_suffix(".png"), found, heading)])
    refuse_texts(sum(one.num_different or 0 for one in found))


def _table(found: Sequence[Throughput]) -> Table:
    table = Table(
        "batch size", "method", "tokens/s", "ms per token", "speed by mlx-lm's", "interval",
        "tokens/step", "different texts",
    )  # fmt: skip
    for one in found:
        table.add_row(
            str(one.batch_size),
            one.way,
            f"{one.throughput.median:.1f}",
            f"{1e3 * one.latency.median:.1f}",
            f"{one.speedup.median:.2f}",
            one.speedup.span(),
            f"{one.tokens_per_step:.2f}",
            "" if one.num_different is None else str(one.num_different),
        )
    return table
