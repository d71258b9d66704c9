"""Predict speedups on a chip with this package's kernel for quantised weights; not measured."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial

from mlx_redrafter.bench.chips import find_chip
from mlx_redrafter.bench.cost_model import Question
from mlx_redrafter.bench.lab.chip_prediction import (
    conclude,
    default_drafter_parameters,
    predict_default,
    prediction_table,
)
from mlx_redrafter.bench.lab.kernel_model import ASSUMPTION, INPUT, verify_ratio
from mlx_redrafter.bench.predict import APPLE_ACCEPTANCE, assumptions, predict
from mlx_redrafter.cli.bench_output import parse_count, show


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--chip", required=True, help="name of the chip, such as 'M2 Ultra'")
    parser.add_argument("--parameters", default="8B", help="size of the target")
    parser.add_argument("--bits", type=int, choices=sorted(INPUT), default=4)


def run(arguments: Namespace) -> None:
    """Run the command."""
    chip, bits = find_chip(arguments.chip), arguments.bits
    size = parse_count(arguments.parameters)
    estimate = partial(verify_ratio, chip, bits)
    drafter_size = default_drafter_parameters(size)
    question = Question(chip, size, bits, drafter_size, verify_estimate=estimate)
    found = predict(question, APPLE_ACCEPTANCE)
    rows = [predict_default(question, found), *found]
    notes = (*assumptions(question), ASSUMPTION, conclude(found))
    show(prediction_table(question, rows), *notes)
