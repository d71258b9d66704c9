"""``redrafter-mlx bench throughput``: what several texts at once gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_options import Out, Prompts, TextTokens
from mlx_redrafter.cli.bench_output import draw, parse_ints, progress, refuse_texts, show, warn
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.cli.text_options import Seed, Temp
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.generation_options import SamplingParams

if TYPE_CHECKING:
    from mlx_redrafter.bench.throughput import Throughput


def throughput(
    prompts: Prompts,
    pair: Pair,
    *,
    batch_sizes: Annotated[
        str, typer.Option(help="Texts at once, such as 1,2,4-6.")
    ] = "1,2,4,8,16",
    widths: Annotated[str, typer.Option(help="Beam widths of fixed drafts.")] = "1,2,4",
    beam_length: Annotated[
        int, typer.Option(help="Beam length of fixed drafts, root included.")
    ] = DraftShape.length,
    max_tokens: TextTokens = 64,
    rounds: Annotated[int, typer.Option(help="Samples of each number.")] = 5,
    temp: Temp = 0.0,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Compare mlx-lm's batches, plain ones, drafted ones and fixed beams, by texts at once.

    The file is written after each number of texts. The exit code is 1 if a text is not the
    target's own.
    """
    SamplingParams(temp, seed=seed)
    sizes = parse_ints(batch_sizes)
    plans = [DraftPlan.of(width, beam_length, None, "top_n") for width in parse_ints(widths)]
    for name, value in (("max_tokens", max_tokens), ("rounds", rounds)):
        check_int(name, value, 1)
    target, tokenizer, drafter = pair.load()
    from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
    from mlx_redrafter.bench.plots import plot_throughput, title
    from mlx_redrafter.bench.result_file import new_result, pair_names, write_result
    from mlx_redrafter.bench.runs import Setting
    from mlx_redrafter.bench.throughput import measure_throughput

    encoded = prompts.encode(tokenizer)
    setting = Setting(target, tokenizer, drafter, max_tokens, temp, seed)
    watch = LoadWatch()
    configuration = {
        **pair_names(pair.model, pair.drafter_name, drafter),
        **prompts.describe(encoded),
        "max_tokens": max_tokens,
        "rounds": rounds,
        "temp": temp,
        "seed": seed,
    }
    result = new_result("throughput", configuration)

    def keep(found: Sequence[Throughput]) -> None:
        result.update(found=found, disturbances=find_disturbances(watch.others()))
        if out is not None:
            write_result(out, result)

    with progress("Rounds") as on_progress:
        found = measure_throughput(setting, plans, encoded, sizes, rounds, on_progress, keep)
    show(_table(found))
    warn(result["disturbances"])
    if out is not None:
        heading = title(result, target)
        draw(lambda: [plot_throughput(out.with_suffix(".png"), found, heading)])
    refuse_texts(sum(one.num_different or 0 for one in found))


def _table(found: Sequence[Throughput]) -> Table:
    table = Table(
        "texts at once", "way", "tokens/s", "ms per token", "by mlx-lm's", "interval",
        "tokens/step", "different",
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
