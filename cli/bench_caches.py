"""``redrafter-mlx bench caches``: what steps cost as a text grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_options import Out
from mlx_redrafter.cli.bench_output import draw, parse_ints, progress, show, warn
from mlx_redrafter.cli.text_options import MODEL

if TYPE_CHECKING:
    from mlx_redrafter.bench.caches import CacheCost


def caches(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to make a random one like, by its config.json alone: a folder or a hub "
            "repository. Small ones by default.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None,
    contexts: Annotated[str, typer.Option(help="Lengths to measure at.")] = "256,1024,4096,16384",
    tree_nodes: Annotated[int, typer.Option(help="Tokens per forward pass.")] = 8,
    rounds: Annotated[int, typer.Option(help="Samples of each number.")] = 20,
    out: Out = None,
) -> None:
    """Measure steps of random models whose layers keep all tokens, windows, states; or of yours."""
    lengths = parse_ints(contexts)
    check_int("tree_nodes", tree_nodes, 2)
    check_int("rounds", rounds, 2)
    from mlx_redrafter.bench.caches import MODELS, measure_caches
    from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
    from mlx_redrafter.bench.plots import machine_name, plot_caches
    from mlx_redrafter.bench.result_file import checkpoint_name, new_result, write_result
    from mlx_redrafter.checkpoint_files import find_checkpoint, read_config
    from mlx_redrafter.proposers.checkpoint import CONFIG_ONLY

    configs = MODELS
    if model is not None:
        configs = {checkpoint_name(model): read_config(find_checkpoint(model, CONFIG_ONLY))}
    watch = LoadWatch()
    with progress("Rounds") as on_progress:
        found = measure_caches(configs, lengths, tree_nodes, rounds, on_progress)
    show(_table(found))
    warn(disturbances := find_disturbances(watch.others()))
    if out is not None:
        configuration = {"configs": configs, "tree_nodes": tree_nodes, "rounds": rounds}
        result = new_result("caches", configuration, found=found, disturbances=disturbances)
        write_result(out, result)
        heading = f"random models, {tree_nodes} tokens a tree, on {machine_name(result)}"
        draw(lambda: [plot_caches(out.with_suffix(".png"), found, heading)])


def _table(found: Sequence[CacheCost]) -> Table:
    from mlx_redrafter.bench.caches import ONE

    one, *others = found[0].seconds
    table = Table("layers keep", "tokens before", f"{one}, ms", *others, "peak, MB")
    for cost in found:
        ratios = (f"{cost.ratios[name]:.2f}" for name in others)
        milliseconds = f"{1e3 * cost.seconds[ONE].median:.2f}"
        table.add_row(
            cost.model, f"{cost.context:,}", milliseconds, *ratios, f"{cost.peak / 1e6:.1f}"
        )
    return table
