"""Time steps of random models whose layers keep all tokens, windows or states, or of your model."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from rich.table import Table

from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
from mlx_redrafter.bench.lab.caches import MODELS, ONE, CacheCost, measure_caches
from mlx_redrafter.bench.lab.options import add_out, at_least
from mlx_redrafter.bench.lab.plots import plot_caches
from mlx_redrafter.bench.plots import machine_name
from mlx_redrafter.bench.result_file import checkpoint_name, new_result, write_result
from mlx_redrafter.checkpoint_files import find_checkpoint, read_config
from mlx_redrafter.cli.bench_output import draw, parse_ints, progress, show, warn
from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", help="make a random model of this one's config.json")
    parser.add_argument("--contexts", default="256,1024,4096,16384", help="lengths to measure at")
    parser.add_argument("--tree-nodes", type=at_least(2), default=8, help="tokens per pass")
    parser.add_argument("--rounds", type=at_least(2), default=20, help="samples of each number")
    add_out(parser)


def run(arguments: Namespace) -> None:
    """Run the command."""
    lengths, nodes, rounds = parse_ints(arguments.contexts), arguments.tree_nodes, arguments.rounds
    configs = MODELS
    if (model := arguments.model) is not None:
        configs = {checkpoint_name(model): read_config(find_checkpoint(model, CONFIG_ONLY))}
    watch = LoadWatch()
    with progress("Rounds") as on_progress:
        found = measure_caches(configs, lengths, nodes, rounds, on_progress)
    show(_table(found))
    warn(disturbances := find_disturbances(watch.others()))
    if (out := arguments.out) is not None:
        configuration = {"configs": configs, "tree_nodes": nodes, "rounds": rounds}
        result = new_result("caches", configuration, found=found, disturbances=disturbances)
        write_result(out, result)
        heading = f"random models, {nodes} tokens a tree, on {machine_name(result)}"
        draw(lambda: [plot_caches(out.with_suffix(".png"), found, heading)])


def _table(found: Sequence[CacheCost]) -> Table:
    one, *others = found[0].seconds
    table = Table("layers keep", "context", f"{one}, ms", *others, "peak, MB")
    for cost in found:
        ratios = (f"{cost.ratios[name]:.2f}" for name in others)
        milliseconds = f"{1e3 * cost.seconds[ONE].median:.2f}"
        table.add_row(
            cost.model, f"{cost.context:,}", milliseconds, *ratios, f"{cost.peak / 1e6:.1f}"
        )
    return table
