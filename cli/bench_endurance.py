"""``redrafter-mlx bench endurance``: soak test on one long text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mlx_redrafter.cli.bench_options import PROMPT, Out, RecurrentPair, TextPrompt
from mlx_redrafter.cli.bench_output import draw, progress, show, warn
from mlx_redrafter.cli.text_options import DraftSizeOptions
from mlx_redrafter.draft_plan import find_plan

if TYPE_CHECKING:
    from mlx_redrafter.bench.endurance import Window


def endurance(
    pair: RecurrentPair,
    sizes: DraftSizeOptions,
    prompt: TextPrompt = PROMPT,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 20000,
    window: Annotated[int, typer.Option(help="Tokens per window.")] = 1000,
    out: Out = None,
) -> None:
    """Run a soak test: decode one long text, past its end, and watch memory and step time.

    The exit code is 1 if either grows by more than the K/V rows and attention to them explain.
    """
    plan = find_plan(**vars(sizes), select="top_n")
    target, tokenizer, loaded = pair.load()
    from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
    from mlx_redrafter.bench.endurance import endure, judge
    from mlx_redrafter.bench.plots import plot_endurance, title
    from mlx_redrafter.bench.result_file import new_result, pair_names, write_result
    from mlx_redrafter.engine.prompt_encoding import encode_question

    ids = encode_question(tokenizer, prompt, use_template=False)
    windows: list[Window] = []
    configuration = {
        **pair_names(pair.model, pair.drafter, loaded),
        "shape": "auto" if plan is None else plan.options,
        "prompt_tokens": len(ids),
        "tokens": tokens,
        "window": window,
    }
    result = new_result("endurance", configuration, windows=windows)
    watch = LoadWatch()
    with progress("Windows") as on_progress:
        for found in endure(target, loaded, ids, plan, tokens, window):
            windows.append(found)
            on_progress(len(windows), tokens // window)
            if out is not None:  # an interrupted text of hours leaves its windows
                write_result(out, result)
    findings = judge(windows)
    show(_table(windows))
    for finding in findings:
        verdict = "ok" if finding.holds else "BROKEN"
        numbers = f"{finding.found:.2f} {finding.unit}, bound {finding.bound:.2f} {finding.unit}"
        show(f"{finding.name}: {numbers}: {verdict}")
    warn(disturbances := find_disturbances(watch.others()))
    if out is not None:
        write_result(out, {**result, "findings": findings, "disturbances": disturbances})
        heading = title(result, target, f"one greedy text of {tokens:,} tokens")
        draw(lambda: [plot_endurance(out.with_suffix(".png"), windows, heading)])
    if not all(finding.holds for finding in findings):
        raise typer.Exit(1)


def _table(windows: Sequence[Window]) -> Table:
    from mlx_redrafter.bench.endurance import FIXED
    from mlx_redrafter.bench.runs import STOCK

    columns = (
        "length", "tokens/step", "most frequent shape", "its step, ms", "verify alone, ms", "ratio",
        f"{STOCK}, ms", f"{FIXED}, ms", "memory, MB", "peak, MB", "K/V, MB", "K/V rows",
    )  # fmt: skip
    table = Table(*columns)
    for window in windows:
        name = window.most_frequent
        steps = window.steps[name]
        times = (steps.median, steps.alone, *(window.forwards[key] for key in (STOCK, FIXED)))
        step, alone, stock, fixed = (f"{1e3 * seconds:.2f}" for seconds in times)
        memory, peak, rows = (
            f"{size / 1e6:.1f}" for size in (window.memory, window.peak, window.kv_bytes)
        )
        table.add_row(
            str(window.length), f"{window.tokens_per_step:.2f}", name, step, alone,
            f"{window.ratio(name):.2f}", stock, fixed, memory, peak, rows, str(window.kv_rows),
        )  # fmt: skip
    return table
