"""Measure memory against its bounds, with a random pair.

The exit code is 1 if a bound is broken.
"""

from argparse import ArgumentParser, Namespace

import typer

from mlx_redrafter.bench.lab.memory import measure_memory, random_pair
from mlx_redrafter.bench.lab.options import add_out, at_least
from mlx_redrafter.bench.recording import LoadWatch, find_disturbances
from mlx_redrafter.bench.result_file import new_result, write_result
from mlx_redrafter.cli.bench_output import progress, show_lines, warn
from mlx_redrafter.draft_plan import DraftPlan


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=at_least(64), default=4096)
    add_out(parser)


def run(arguments: Namespace) -> None:
    plan, (target, drafter) = DraftPlan.of(), random_pair()
    watch = LoadWatch()
    with progress("Measurements") as on_progress:
        findings = measure_memory(target, drafter, plan, arguments.prompt_tokens, on_progress)
    table = [("measurement", "found", "bound", "unit", "verdict")]
    for one in findings:
        verdict = "ok" if one.holds else "BROKEN"
        table.append((one.name, f"{one.found:.1f}", f"{one.bound:.1f}", one.unit, verdict))
    show_lines(table)
    warn(disturbances := find_disturbances(watch.others()))
    if arguments.out is not None:
        configuration = {**plan.options, "prompt_tokens": arguments.prompt_tokens}
        result = new_result("memory", configuration, findings=findings, disturbances=disturbances)
        write_result(arguments.out, result)
    if not all(finding.holds for finding in findings):
        raise typer.Exit(1)
