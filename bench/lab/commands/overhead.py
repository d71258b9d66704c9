"""Measure the cost of a step beyond draft and verify, as a share of a plain mlx-lm step.

The exit code is 1 if the upper end of the interval is above the goal.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace

import typer
from rich.table import Table

from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
from mlx_redrafter.bench.lab.options import (
    PROMPT,
    add_out,
    add_pair,
    add_shape,
    at_least,
    describe_pair,
    load_recurrent_pair,
    read_plan,
)
from mlx_redrafter.bench.lab.overhead import Overhead, measure_overhead
from mlx_redrafter.bench.lab.rounds import scaled
from mlx_redrafter.bench.result_file import new_result, write_result
from mlx_redrafter.cli.bench_output import progress, show, warn
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.prompt_encoding import encode_question
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    add_shape(parser)
    parser.add_argument("-p", "--prompt", default=PROMPT)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--rounds", type=at_least(2), default=100, help="step, verify and draft")
    parser.add_argument(
        "-m", "--max-tokens", type=at_least(2), default=1000, help="restart the text after these"
    )
    parser.add_argument("--goal", type=float, default=0.08, help="maximum share of a plain step")
    add_out(parser)


def run(arguments: Namespace) -> None:
    """Run the command."""
    SamplingParams(arguments.temp)
    if not 0 < arguments.goal < math.inf:
        raise ConfigError(f"expected a share above 0 as the goal, got {arguments.goal}")
    plan = read_plan(arguments)
    target, tokenizer, drafter = load_recurrent_pair(arguments)
    ids = encode_question(tokenizer, arguments.prompt, use_template=False)
    watch = LoadWatch()
    with progress("Triples") as on_progress:
        found = measure_overhead(
            target, drafter, ids, plan, arguments.rounds, arguments.temp, arguments.max_tokens,
            on_progress,
        )  # fmt: skip
    show(_table(found), _remarks(found, plan, arguments.goal))
    warn(disturbances := find_disturbances(watch.others()))
    if arguments.out is not None:
        configuration = {
            **describe_pair(arguments, drafter),
            **plan.options,
            **{name: getattr(arguments, name) for name in ("temp", "rounds", "max_tokens")},
            "prompt_tokens": len(ids),
        }
        result = new_result(
            "overhead", configuration, share=found.share, found=found, disturbances=disturbances
        )
        write_result(arguments.out, result)
    if found.share.high > arguments.goal:
        raise typer.Exit(1)


def _table(found: Overhead) -> Table:
    plain = found.parts["stock step"].median
    table = Table("part", "ms", "interval", "of a plain step")
    for name, part in [
        *found.parts.items(),
        ("overhead", found.overhead),
        ("overhead, host work included", found.unhidden),
    ]:
        interval = scaled(part, 1e3).span()
        table.add_row(name, f"{part.median * 1e3:.2f}", interval, f"{part.median / plain:.1%}")
    return table


def _remarks(found: Overhead, plan: DraftPlan, goal: float) -> str:
    return (
        f"verify({plan.num_nodes})/verify(1): "
        f"{found.parts['verify'].median / found.parts['verify(1)'].median:.2f}; "
        f"draft per level: {found.parts['draft'].median / plan.shape.levels * 1e3:.2f} ms; "
        f"{found.tokens_per_step:.2f} tokens/step\n"
        f"overhead: {found.share.median:.1%} of a plain step, {found.share.span('.1%')}; "
        f"goal: at most {goal:.0%}"
    )
