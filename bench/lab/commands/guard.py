"""Measure the worst case: stock mlx-lm against the default on prompts that are hard to draft for.

Cases are random tokens, other languages, source code, and a drafter of random weights. The exit
code is 1 if the default is slower than allowed, or a text differs from the target's own.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

import typer
from rich.table import Table

from mlx_redrafter.bench.lab.cases import NAMES, make_cases
from mlx_redrafter.bench.lab.guard import MIN_TOKENS, GuardResult, guard
from mlx_redrafter.bench.lab.options import (
    add_out,
    add_pair,
    add_sampling,
    at_least,
    describe_pair,
    load_recurrent_pair,
    make_settings,
)
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.timing import MedianEstimate
from mlx_redrafter.cli.bench_output import progress, refuse_texts, show, warn


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    parser.add_argument("--case", choices=NAMES, action="append", help="default: all; repeatable")
    parser.add_argument("--pairs", type=at_least(1), default=9, help="pairs of answers per case")
    parser.add_argument("-m", "--max-tokens", type=at_least(2), default=256)
    add_sampling(parser)
    parser.add_argument("--ignore-chat-template", action="store_true")
    add_out(parser, can_resume=True)


def run(arguments: Namespace) -> None:
    """Run the command."""
    target, tokenizer, drafter = load_recurrent_pair(arguments)
    settings = make_settings(arguments, target, tokenizer, drafter)
    use_template = not arguments.ignore_chat_template
    names = arguments.case or NAMES
    cases = make_cases(tokenizer, drafter, use_template, arguments.seed, names)
    options = ("pairs", "max_tokens", "temp", "seed", "ignore_chat_template")
    configuration = {
        **describe_pair(arguments, drafter),
        **{name: getattr(arguments, name) for name in options},
        "cases": [one.name for one in cases],
    }
    recording = Recording(arguments.out, "guard", configuration, arguments.resume)
    with progress("Pairs") as on_progress:
        results = guard(settings, cases, arguments.pairs, recording, on_progress)
    show(_table(results))
    for result in results:
        show(*_remarks(result))
    seconds = recording.result["calibration_seconds"]
    show(f"timing the draft shapes took {seconds:.1f} s, which no answer's time includes")
    warn(recording.result["disturbances"])
    refuse_texts(sum(result.num_different for result in results))
    if not all(result.holds for result in results):
        raise typer.Exit(1)


def _table(results: Sequence[GuardResult]) -> Table:
    columns = (
        "case", "mlx-lm's time / auto's", "interval", "worst pair", "with the prompt",
        "interval", "tokens/step", "plain steps", "pairs", "",
    )  # fmt: skip
    table = Table(*columns)
    for result in results:
        worst, tokens, plain = result.worst, result.tokens_per_step, result.plain_share
        table.add_row(
            result.case,
            *_median_and_interval(result.decode),
            "" if worst is None else f"{worst:.3f}",
            *_median_and_interval(result.total),
            "" if tokens is None else f"{tokens:.2f}",
            "" if plain is None else f"{plain:.0%}",
            str(result.num_pairs),
            "ok" if result.holds else "BROKEN",
        )
    return table


def _remarks(result: GuardResult) -> list[str]:
    remarks = []
    if result.num_short:
        short = f"{result.num_short} pairs of answers shorter than {MIN_TOKENS} tokens"
        remarks.append(f"{result.case}: {short} are left out")
    if result.num_missing:
        remarks.append(f"{result.case}: {result.num_missing} pairs are missing")
    if result.num_different:
        remarks.append(f"{result.case}: {result.num_different} texts differ")
    return remarks


def _median_and_interval(value: MedianEstimate | None) -> tuple[str, str]:
    return ("", "") if value is None else (f"{value.median:.3f}", value.span(".3f"))
