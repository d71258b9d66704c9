"""``redrafter-mlx bench predict``: speed on a chip that is not at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mlx_redrafter.cli.bench_output import parse_count, show
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_redrafter.bench.predict import Question, ShapePrediction

NOTICE = "PREDICTION, not a measurement"


def predict(
    chip: Annotated[str, typer.Option(help="Name of the chip, such as 'M2 Ultra'.")],
    parameters: Annotated[str, typer.Option(help="Size of the target, such as 7B.")] = "6.74B",
    bits: Annotated[int, typer.Option(help="Bits of the target's weights: 16, 8 or 4.")] = 16,
    drafter_parameters: Annotated[
        str | None,
        typer.Option(
            help="Size of the drafter, in 16 bits.",
            show_default="that of Apple's for Vicuna-7B, 396M, scaled to the target",
        ),
    ] = None,
    plain_ms: Annotated[
        float | None,
        typer.Option(help="A plain step measured on that chip, in ms.", show_default="predicted"),
    ] = None,
    acceptance: Annotated[
        Path | None,
        typer.Option(
            help="sweep.json with the tokens per step of each shape.",
            show_default="Apple's, for Vicuna-7B",
        ),
    ] = None,
) -> None:
    """Predict the speedup by drafting on an Apple chip, before buying or borrowing one."""
    if plain_ms is not None and not 0 < plain_ms < math.inf:
        raise ConfigError(f"--plain-ms must be above 0 and finite, got {plain_ms}")
    from mlx_redrafter.bench import predict as model
    from mlx_redrafter.bench.chips import find_chip

    size = parse_count(parameters)
    if drafter_parameters is None:
        drafter_size = model.default_drafter_parameters(size)
    else:
        drafter_size = parse_count(drafter_parameters)
    question = model.Question(find_chip(chip), size, bits, drafter_size, plain=plain_ms)
    known = model.APPLE_ACCEPTANCE if acceptance is None else model.read_acceptances(acceptance)
    found = model.predict(question, known)
    source = "Apple's for Vicuna-7B, one prompt" if acceptance is None else acceptance.name
    default = model.predict_default(question, found)
    show(
        prediction_table(question, [default, *found]),
        f"{NOTICE}. Tokens per step: {source}.",
        *model.assumptions(question),
        model.conclude(found),
    )


def prediction_table(question: Question, found: Sequence[ShapePrediction]) -> Table:
    """Make a table of predicted shapes, and of decoding without drafts."""
    size = f"{question.num_parameters / 1e9:.3g}B parameters, {question.bits} bits"
    title = f"{NOTICE}: {question.chip.name}, {size}"
    columns = ("shape", "tokens verified", "tokens/step", "step, ms", "tokens/s", "speedup")
    table = Table(*columns, title=title)
    for one in found:
        shape = one.acceptance
        cells = (f"{shape.tokens:.1f}", f"{shape.tokens_per_step:.2f}", f"{one.step:.1f}")
        table.add_row(shape.name, *cells, f"{one.tokens_per_second:.1f}", f"{one.speedup:.2f}")
    plain = question.plain_step
    table.add_row("no drafting", "1", "1", f"{plain:.1f}", f"{1e3 / plain:.1f}", "1.00")
    return table
