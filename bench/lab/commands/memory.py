"""Measure memory against its bounds, with a random pair unless one is given.

The exit code is 1 if a bound is broken.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import typer
from rich.table import Table

from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
from mlx_redrafter.bench.lab.memory import measure_memory, random_pair
from mlx_redrafter.bench.lab.options import (
    add_out,
    add_pair,
    add_shape,
    at_least,
    load_recurrent_pair,
    read_plan,
)
from mlx_redrafter.bench.result_file import new_result, pair_names, write_result
from mlx_redrafter.cli.bench_output import progress, show, warn


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    add_shape(parser)
    parser.add_argument("--prompt-tokens", type=at_least(64), default=4096)
    add_out(parser)


def run(arguments: Namespace) -> None:
    """Run the command."""
    plan = read_plan(arguments)
    if arguments.model is None and arguments.drafter is None:
        names = ("random", "random")
        target, drafter = random_pair()
    else:
        names = (arguments.model, arguments.drafter)
        target, _, drafter = load_recurrent_pair(arguments)
    watch = LoadWatch()
    with progress("Measurements") as on_progress:
        findings = measure_memory(target, drafter, plan, arguments.prompt_tokens, on_progress)
    table = Table("measurement", "found", "bound", "unit", "")
    for finding in findings:
        verdict = "ok" if finding.holds else "BROKEN"
        table.add_row(
            finding.name, f"{finding.found:.1f}", f"{finding.bound:.1f}", finding.unit, verdict
        )
    show(table)
    warn(disturbances := find_disturbances(watch.others()))
    if arguments.out is not None:
        configuration = {
            **pair_names(*names, drafter),
            **plan.options,
            "prompt_tokens": arguments.prompt_tokens,
        }
        result = new_result("memory", configuration, findings=findings, disturbances=disturbances)
        write_result(arguments.out, result)
    if not all(finding.holds for finding in findings):
        raise typer.Exit(1)
