"""Measure the host's time to build the pass that verifies a tree, compiled and not."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import nullcontext

from rich.table import Table

from mlx_redrafter.bench.lab.host_time import MODELS, gpu_like, measure, measure_steps
from mlx_redrafter.bench.lab.options import at_least
from mlx_redrafter.cli.bench_output import show
from mlx_redrafter.draft_plan import DraftPlan


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--tree-nodes", type=at_least(3), default=8, help="tokens per pass")
    parser.add_argument("--rounds", type=at_least(2), default=60, help="passes to measure")
    parser.add_argument("--as-on-cpu", action="store_true", help="operations of the CPU back end")


def run(arguments: Namespace) -> None:
    """Run the command."""
    plan = DraftPlan.of(2, 6, arguments.tree_nodes)
    steps = Table("model", "compiled", "drafts to verify, ms: device waits", "host", "reads")
    table = Table("model", "compiled", "build, ms: least", "median", "commit", "dispatch", "first")
    with nullcontext() if arguments.as_on_cpu else gpu_like():
        for name, config in MODELS.items():
            for compiled in (False, True):
                found = measure(config, arguments.tree_nodes, compiled, arguments.rounds)
                times = ["" if one is None else f"{1e3 * one:.2f}" for one in found]
                table.add_row(name, "yes" if compiled else "no", *times)
                step = measure_steps(config, plan, compiled, arguments.rounds)
                seconds = (f"{1e3 * one:.2f}" for one in (step.waiting, step.dispatch))
                steps.add_row(name, "yes" if compiled else "no", *seconds, f"{step.reads:.2f}")
    show(table)
    show(steps)
