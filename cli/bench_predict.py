"""``redrafter-mlx bench predict``: speed on a chip that is not at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mlx_redrafter.cli.bench_options import Out
from mlx_redrafter.cli.bench_output import parse_count, show
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_redrafter.bench.predict import Prediction, Question
    from mlx_redrafter.bench.validation import LeftOut

NOTICE = "PREDICTION, not a measurement"


@dataclass(frozen=True)
class Weights:
    """Sizes of the target and its drafter."""

    parameters: Annotated[str, typer.Option(help="Size of the target, such as 7B.")] = "6.74B"
    bits: Annotated[int, typer.Option(help="Bits of the target's weights: 16, 8 or 4.")] = 16
    drafter_parameters: Annotated[
        str | None,
        typer.Option(
            help="Size of the drafter; by default that of Apple's for Vicuna-7B, 396M, scaled to "
            "the target."
        ),
    ] = None
    drafter_bits: Annotated[int, typer.Option(help="Bits of the drafter's weights.")] = 16


def predict(
    *,
    chip: Annotated[str | None, typer.Option(help="Name of the chip, such as 'M2 Ultra'.")] = None,
    weights: Weights,
    plain_ms: Annotated[
        float | None, typer.Option(help="A plain step measured there, in ms.", show_default=False)
    ] = None,
    acceptance: Annotated[
        Path | None,
        typer.Option(
            help="sweep.json to take tokens per step from.", show_default="Apple's, for Vicuna-7B"
        ),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Verify with this package's kernel where that is estimated to be faster; nobody "
            "has timed it.",
        ),
    ] = False,
    validate: Annotated[
        Path | None,
        typer.Option(help="Folder of Apple's sweeps: print how wrong the model is instead."),
    ] = None,
    out: Out = None,
) -> None:
    """Predict speedups of a target on an Apple chip, before buying or borrowing one."""
    if validate is not None:
        _validate(validate, out)
        return
    if chip is None:
        raise ConfigError("no chip given; say --chip 'M2 Ultra', or --validate FOLDER")
    if plain_ms is not None and plain_ms <= 0:
        raise ConfigError(f"--plain-ms must be above 0, got {plain_ms}")
    from mlx_redrafter.bench import predict as model
    from mlx_redrafter.bench.chips import find_chip
    from mlx_redrafter.bench.result_file import new_result, write_result

    size = parse_count(weights.parameters)
    drafter = weights.drafter_parameters
    question = model.Question(
        find_chip(chip),
        size,
        weights.bits,
        model.default_drafter_parameters(size) if drafter is None else parse_count(drafter),
        weights.drafter_bits,
        plain_ms,
        kernels,
    )
    found = model.predict(
        question,
        model.APPLE_ACCEPTANCE if acceptance is None else model.read_acceptances(acceptance),
    )
    source = "Apple's for Vicuna-7B, one prompt" if acceptance is None else acceptance.name
    notes = model.assumptions(question)
    default = model.predict_default(question, found)
    show(
        _table(question, [default, *found], weights),
        f"{NOTICE}. Tokens per step: {source}.",
        *notes,
        model.conclude(found),
    )
    if out is not None:
        notes = [NOTICE, *notes]
        write_result(out, new_result("predict", vars(question), notes=notes, found=found))


def _table(question: Question, found: Sequence[Prediction], weights: Weights) -> Table:
    title = f"{NOTICE}: {question.chip.name}, {weights.parameters} parameters, {weights.bits} bits"
    table = Table("shape", "T", "tokens/step", "step, ms", "tokens/s", "speedup", title=title)
    for one in found:
        shape = one.acceptance
        cells = (f"{shape.tokens:.1f}", f"{shape.tokens_per_step:.2f}", f"{one.step:.1f}")
        table.add_row(shape.name, *cells, f"{one.tokens_per_second:.1f}", f"{one.speedup:.2f}")
    plain = question.plain_step
    table.add_row("no drafting", "1", "1", f"{plain:.1f}", f"{1e3 / plain:.1f}", "1.00")
    return table


def _validate(folder: Path, out: Path | None) -> None:
    from mlx_redrafter.bench.result_file import new_result, write_result
    from mlx_redrafter.bench.validation import leave_one_out, read_apple_sweeps

    found = leave_one_out(read_apple_sweeps(folder))
    show(_errors_table(found), _shapes_table(found))
    overall = median(abs(error) for one in found for error in one.errors)
    worst = min(best.share for one in found for best in one.best)
    show(
        f"median error of step time {overall:.1%} (bound 15%, goal 10%); the predicted best shape "
        f"reaches at least {worst:.1%} of the best measured speedup (bound 95%)"
    )
    if out is not None:
        write_result(out, new_result("predict validation", {}, found=found))
    if overall > 0.15 or worst < 0.95:
        raise typer.Exit(1)


def _errors_table(found: list[LeftOut]) -> Table:
    title = "step time, predicted from the other two chips and the chip's plain decoding"
    table = Table("chip", "rows", "median error", "median, signed", "largest", title=title)
    for one in found:
        largest = max(one.errors, key=abs)
        table.add_row(
            one.chip, str(len(one.errors)), f"{one.median_error:.1%}", f"{median(one.errors):+.1%}",
            f"{largest:+.1%}",
        )  # fmt: skip
    return table


def _shapes_table(found: list[LeftOut]) -> Table:
    columns = ("chip", "dtype", "tokens", "predicted best", "measured best", "share of its speedup")
    table = Table(*columns, title="best shape (W, L)")
    for one in found:
        for best in one.best:
            way = "greedy" if best.greedy else "sampled"
            shapes = (str(best.predicted), str(best.measured))
            table.add_row(one.chip, best.dtype, way, *shapes, f"{best.share:.1%}")
    return table


def training() -> None:
    """Print the computed cost of training on a million tokens, by model and chip, as Markdown."""
    from mlx_redrafter.bench.training_cost import render_table

    typer.echo(render_table())
