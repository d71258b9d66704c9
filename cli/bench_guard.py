"""``redrafter-mlx bench guard``: worst-case regression against stock mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_options import RecurrentPair, Resume, TextTokens
from mlx_redrafter.cli.bench_output import progress, refuse_texts, show, warn
from mlx_redrafter.cli.text_options import IgnoreChatTemplate, Seed, Temp
from mlx_redrafter.generation_options import SamplingParams

if TYPE_CHECKING:
    from mlx_redrafter.bench.guard import Verdict
    from mlx_redrafter.bench.timing import Estimate


def guard(
    pair: RecurrentPair,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            help="Measure this case, not all four; may be repeated.",
            show_default=False,
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(help="Pairs of answers of each case.")] = 9,
    max_tokens: TextTokens = 256,
    temp: Temp = 0.0,
    seed: Seed = 0,
    ignore_chat_template: IgnoreChatTemplate = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file.")] = None,
    resume: Resume = False,
) -> None:
    """Measure the worst-case regression: stock mlx-lm against auto on bad drafts.

    Cases are random tokens, other languages, source code, and a drafter of random weights. The exit
    code is 1 if auto is slower than allowed, or a text is not the target's own.
    """
    check_int("pairs", pairs, 1)
    check_int("max_tokens", max_tokens, 2)
    SamplingParams(temp, seed=seed)
    target, tokenizer, loaded = pair.load()
    from mlx_redrafter.bench.cases import NAMES, make_cases
    from mlx_redrafter.bench.guard import guard as measure
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.result_file import pair_names
    from mlx_redrafter.bench.runs import Setting

    cases = make_cases(tokenizer, loaded, not ignore_chat_template, seed, case or NAMES)
    configuration = {
        **pair_names(pair.model, pair.drafter, loaded),
        "pairs": pairs,
        "max_tokens": max_tokens,
        "temp": temp,
        "seed": seed,
        "ignore_chat_template": ignore_chat_template,
        "cases": [one.name for one in cases],
    }
    recording = Recording(out, "guard", configuration, resume)
    setting = Setting(target, tokenizer, loaded, max_tokens, temp, seed)
    with progress("Pairs") as on_progress:
        verdicts = measure(setting, cases, pairs, recording, on_progress)
    show(_table(verdicts))
    for verdict in verdicts:
        show(*_remarks(verdict))
    calibration = recording.result["calibration_seconds"]
    show(f"timing the shapes took {calibration:.1f} s, which no answer's time includes")
    warn(recording.result["disturbances"])
    refuse_texts(sum(verdict.num_different for verdict in verdicts))
    if not all(verdict.holds for verdict in verdicts):
        raise typer.Exit(1)


def _table(verdicts: Sequence[Verdict]) -> Table:
    columns = (
        "case", "mlx-lm's time / auto's", "interval", "worst pair", "with the prompt",
        "interval", "tokens/step", "plain steps", "pairs", "",
    )  # fmt: skip
    table = Table(*columns)
    for verdict in verdicts:
        worst, tokens, plain = verdict.worst, verdict.tokens_per_step, verdict.plain_share
        table.add_row(
            verdict.case,
            *_median_and_interval(verdict.decode),
            "" if worst is None else f"{worst:.3f}",
            *_median_and_interval(verdict.total),
            "" if tokens is None else f"{tokens:.2f}",
            "" if plain is None else f"{plain:.0%}",
            str(verdict.num_pairs),
            "ok" if verdict.holds else "BROKEN",
        )
    return table


def _remarks(verdict: Verdict) -> list[str]:
    """Remarks on a case beside the table."""
    from mlx_redrafter.bench.guard import LEAST_TOKENS

    remarks = []
    if verdict.num_short:
        short = f"{verdict.num_short} pairs of answers shorter than {LEAST_TOKENS} tokens"
        remarks.append(f"{verdict.case}: {short} are left out")
    if verdict.num_missing:
        remarks.append(f"{verdict.case}: {verdict.num_missing} pairs are missing")
    if verdict.num_different:
        remarks.append(f"{verdict.case}: {verdict.num_different} texts differ")
    return remarks


def _median_and_interval(value: Estimate | None) -> tuple[str, str]:
    if value is None:
        return "", ""
    return f"{value.median:.3f}", value.span(".3f")
