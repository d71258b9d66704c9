"""Predict the speedup by drafting on an Apple chip, with published costs; not measured."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from pathlib import Path

from mlx_redrafter.bench.chips import find_chip
from mlx_redrafter.bench.cost_model import Question
from mlx_redrafter.bench.lab.chip_prediction import (
    NOTICE,
    conclude,
    default_drafter_parameters,
    predict_default,
    prediction_table,
    read_acceptances,
)
from mlx_redrafter.bench.predict import APPLE_ACCEPTANCE, assumptions, predict
from mlx_redrafter.cli.bench_output import parse_count, show
from mlx_redrafter.errors import ConfigError


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--chip", required=True, help="name of the chip, such as 'M2 Ultra'")
    parser.add_argument("--parameters", default="6.74B", help="size of the target, such as 7B")
    parser.add_argument("--bits", type=int, default=16, help="bits of the weights: 16, 8 or 4")
    parser.add_argument("--drafter-parameters", help="size of the drafter, in 16 bits")
    parser.add_argument("--plain-ms", type=float, help="a plain step measured on that chip, in ms")
    parser.add_argument("--acceptance", type=Path, help="sweep.json with the tokens per step")


def run(arguments: Namespace) -> None:
    """Run the command."""
    plain, path = arguments.plain_ms, arguments.acceptance
    if plain is not None and not 0 < plain < math.inf:
        raise ConfigError(f"--plain-ms must be above 0 and finite, got {plain}")
    size, given = parse_count(arguments.parameters), arguments.drafter_parameters
    drafter_size = default_drafter_parameters(size) if given is None else parse_count(given)
    question = Question(find_chip(arguments.chip), size, arguments.bits, drafter_size, plain=plain)
    found = predict(question, APPLE_ACCEPTANCE if path is None else read_acceptances(path))
    source = "Apple's for Vicuna-7B, one prompt" if path is None else path.name
    show(
        prediction_table(question, [predict_default(question, found), *found]),
        f"{NOTICE}. Tokens per step: {source}.",
        *assumptions(question),
        conclude(found),
    )
