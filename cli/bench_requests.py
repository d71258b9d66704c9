"""``redrafter-mlx bench request`` and ``copy``: the cost of a request, and the gain of copying."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_options import Out, Repeats, Resume, TextTokens
from mlx_redrafter.cli.bench_output import progress, refuse_texts, show, warn
from mlx_redrafter.cli.bench_speed import speed_table
from mlx_redrafter.cli.model_options import Pair

REQUEST_PROMPT = [1, 2, 3]


def request(
    pair: Pair,
    rounds: Annotated[int, typer.Option(help="Rounds that count.")] = 50,
    out: Out = None,
) -> None:
    """Measure the work before the first token of a request, without prompt and tokenizer."""
    check_int("rounds", rounds, 1)
    target, tokenizer, loaded = pair.load()
    from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
    from mlx_redrafter.bench.request import measure_request
    from mlx_redrafter.bench.result_file import new_result, pair_names, write_result
    from mlx_redrafter.checkpoint_files import named_parameters

    watch = LoadWatch()
    with progress("Rounds") as on_progress:
        found = measure_request(target, tokenizer, loaded, REQUEST_PROMPT, rounds, on_progress)
    tensors = len(named_parameters(target))
    table = Table("work before the prefill", "ms", "interval", title=f"{tensors} tensors")
    for name, seconds in found.items():
        table.add_row(name, f"{1e3 * seconds.median:.2f}", seconds.scaled(1e3).span())
    show(table)
    warn(disturbances := find_disturbances(watch.others()))
    if out is not None:
        configuration = {
            **pair_names(pair.model, pair.drafter, loaded),
            "rounds": rounds,
            "tensors": tensors,
        }
        write_result(
            out, new_result("request", configuration, found=found, disturbances=disturbances)
        )


def copy(
    pair: Pair,
    max_tokens: TextTokens = 400,
    repeats: Repeats = 3,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Measure texts that repeat their prompt: a document and source code, with edits.

    A logits processor makes every way of decoding write the edited text, as small models do not
    copy. The exit code is 1 if a text is not the target's own.
    """
    check_int("max_tokens", max_tokens, 2)
    check_int("repeats", repeats, 1)
    target, tokenizer, loaded = pair.load()
    from mlx_redrafter.bench.copying import compare_copies, make_copies
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.report import num_different
    from mlx_redrafter.bench.result_file import pair_names
    from mlx_redrafter.bench.runs import Setting

    configuration = {
        **pair_names(pair.model, pair.drafter, loaded),
        "max_tokens": max_tokens,
        "repeats": repeats,
    }
    recording = Recording(out, "copy", configuration, resume)
    setting = Setting(target, tokenizer, loaded, max_tokens)
    with progress("Turns") as on_progress:
        found = compare_copies(setting, make_copies(tokenizer), repeats, recording, on_progress)
    for name, rows in found.items():
        show(speed_table(rows, name))
    warn(recording.result["disturbances"])
    refuse_texts(num_different(row for rows in found.values() for row in rows))
