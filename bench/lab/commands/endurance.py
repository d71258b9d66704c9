"""Decode one long text, past its end, and watch memory and step time.

The exit code is 1 if either grows by more than its bound.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

import typer
from rich.table import Table

from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
from mlx_redrafter.bench.lab.endurance import FIXED, Window, endure, judge
from mlx_redrafter.bench.lab.options import (
    PROMPT,
    add_out,
    add_pair,
    add_shape,
    describe_pair,
    load_recurrent_pair,
    read_plan,
)
from mlx_redrafter.bench.lab.plots import plot_endurance
from mlx_redrafter.bench.plots import title
from mlx_redrafter.bench.result_file import new_result, write_result
from mlx_redrafter.bench.runs import STOCK
from mlx_redrafter.cli.bench_output import draw, progress, show, warn
from mlx_redrafter.engine.prompt_encoding import encode_question


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    add_shape(parser, default=None)
    parser.add_argument("-p", "--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=20000, help="tokens to generate")
    parser.add_argument("--window", type=int, default=1000, help="tokens per window")
    add_out(parser)


def run(arguments: Namespace) -> None:
    """Run the command."""
    plan = None if arguments.shape is None else read_plan(arguments)
    tokens, window, out = arguments.tokens, arguments.window, arguments.out
    target, tokenizer, loaded = load_recurrent_pair(arguments)
    ids = encode_question(tokenizer, arguments.prompt, use_template=False)
    windows: list[Window] = []
    configuration = {
        **describe_pair(arguments, loaded),
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
            if out is not None:  # so that an interrupted text of hours leaves its windows
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
    columns = (
        "length", "tokens/step", "most frequent shape", "its step, ms", "verify alone, ms", "ratio",
        f"{STOCK}, ms", f"{FIXED}, ms", "memory, MB", "peak, MB", "K/V, MB", "K/V entries",
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
