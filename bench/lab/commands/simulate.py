"""Let the default decode simulated texts with simulated drafters and machines; compare regrets."""

from argparse import ArgumentParser, Namespace

import numpy as np

from mlx_redrafter.bench.lab import hard_machines, hard_siblings
from mlx_redrafter.bench.lab.options import add_out, at_least
from mlx_redrafter.bench.lab.regret import simulate_regret
from mlx_redrafter.bench.result_file import new_result, write_result
from mlx_redrafter.cli.bench_output import progress, show_lines


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--scenarios", type=at_least(1), default=300, help="number of scenarios")
    parser.add_argument("--first", type=at_least(0), default=0, help="number of the first one")
    parser.add_argument(
        "--hard",
        choices=("machines", "siblings"),
        help="machines whose steps cost something else than was timed, or drafters whose scores of "
        "siblings mislead",
    )
    add_out(parser)


def run(arguments: Namespace) -> None:
    scenarios, first = arguments.scenarios, arguments.first
    if arguments.hard is not None:
        cases = hard_machines if arguments.hard == "machines" else hard_siblings
        cases.report(range(first, first + scenarios))
        return
    with progress("Scenarios") as on_progress:
        found = simulate_regret(scenarios, first, on_progress)
    table = [("regret", "found")]
    for name, value in (("median", found.median), ("95%", found.p95), ("worst", found.worst)):
        table.append((name, f"{value:.1%}"))
    if found.least_plain is not None:
        table.append(("minimum speed if nothing pays", f"{found.least_plain:.3f}"))
    for name, texts in zip(("without", "with"), zip(*found.first_texts, strict=True), strict=True):
        median, least = (float(np.quantile(texts, share)) for share in (0.5, 0.05))
        table.append((f"first text {name} stored estimates", f"{median:.3f} (5%: {least:.3f})"))
    show_lines(table, f"{scenarios} scenarios, against the best fixed plan")
    if arguments.out is not None:
        configuration = {"scenarios": scenarios, "first": first}
        write_result(arguments.out, new_result("simulate", configuration, found=found))
