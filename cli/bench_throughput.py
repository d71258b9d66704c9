"""``redrafter-mlx bench throughput``: speed of batch generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_options import Out, PromptFile, Prompts, TextTokens, describe_pair
from mlx_redrafter.cli.bench_output import (
    draw,
    parse_ints,
    parse_shapes,
    progress,
    refuse_texts,
    show,
    warn,
)
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.cli.text_options import Temp
from mlx_redrafter.generation_options import SamplingParams

if TYPE_CHECKING:
    from mlx_redrafter.bench.throughput import Throughput


def throughput(
    prompts: PromptFile,
    pair: Pair,
    *,
    batch_sizes: Annotated[
        str, typer.Option(help="Numbers of sequences in a batch, such as 1,2,4-6.")
    ] = "1,2,4,8,16",
    shapes: Annotated[
        str,
        typer.Option(
            help="Fixed draft shapes to measure, each WIDTHxLENGTH or WIDTHxLENGTHxNODES."
        ),
    ] = "1x5,2x5,4x5",
    max_tokens: TextTokens = 64,
    rounds: Annotated[int, typer.Option(help="Number of batches of each size and method.")] = 5,
    temp: Temp = 0.0,
    out: Out = None,
) -> None:
    """Compare batch generation by mlx-lm, plain decoding, the default and fixed draft shapes.

    The file is written after each batch size. The exit code is 1 if a text differs from the
    target's own.
    """
    SamplingParams(temp)
    sizes, plans = parse_ints(batch_sizes), parse_shapes(shapes)
    for name, value in (("max_tokens", max_tokens), ("rounds", rounds)):
        check_int(name, value, 1)
    target, tokenizer, drafter = pair.load()
    from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
    from mlx_redrafter.bench.plots import plot_throughput, title
    from mlx_redrafter.bench.prompts import describe_prompts
    from mlx_redrafter.bench.result_file import new_result, write_result
    from mlx_redrafter.bench.runs import CommonSettings
    from mlx_redrafter.bench.throughput import measure_throughput

    encoded = Prompts(prompts).encode(tokenizer)
    settings = CommonSettings(target, tokenizer, drafter, max_tokens, temp)
    watch = LoadWatch()
    configuration = {
        **describe_pair(pair, drafter),
        **describe_prompts(prompts, encoded),
        "max_tokens": max_tokens,
        "rounds": rounds,
        "temp": temp,
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
