"""Measure the parts of a step: verify(T), drafting by levels, accepting, committing, host work."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.table import Table

from mlx_redrafter.bench.disturbance import LoadWatch, find_disturbances
from mlx_redrafter.bench.lab.options import (
    add_out,
    add_pair,
    add_shape,
    at_least,
    describe_pair,
    load_recurrent_pair,
    read_plan,
)
from mlx_redrafter.bench.lab.plots import plot_profile
from mlx_redrafter.bench.lab.profile import Profile, VerifyCost, profile
from mlx_redrafter.bench.plots import title
from mlx_redrafter.bench.result_file import new_result, write_result
from mlx_redrafter.cli.bench_output import draw, parse_ints, progress, show, warn
from mlx_redrafter.draft_plan import DraftPlan

TOKENS = "1,2,3,4,5,6,8,9,10,12,15,16,20,24,32"


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    add_shape(parser)
    parser.add_argument("--contexts", default="256,1024,4000", help="contexts to verify in")
    parser.add_argument("--tokens", default=TOKENS, help="tokens per forward pass")
    parser.add_argument("--widths", default="1,2,4,8", help="beam widths to draft with")
    parser.add_argument("--rounds", type=at_least(2), default=20, help="samples of each number")
    add_out(parser, "folder")


def run(arguments: Namespace) -> None:
    """Run the command."""
    plan, rounds = read_plan(arguments), arguments.rounds
    lists = (arguments.contexts, arguments.tokens, arguments.widths)
    contexts, sizes, widths = (parse_ints(text) for text in lists)
    target, _, drafter = load_recurrent_pair(arguments)
    watch = LoadWatch()
    with progress("Parts") as on_progress:
        found = profile(target, drafter, plan, contexts, sizes, widths, rounds, on_progress)
    show(*_tables(found, plan))
    warn(disturbances := find_disturbances(watch.others()))
    if (out := arguments.out) is not None:
        configuration = {**describe_pair(arguments, drafter), **plan.options, "rounds": rounds}
        result = new_result("profile", configuration, found=found, disturbances=disturbances)
        write_result(out / "profile.json", result)
        draw(lambda: plot_profile(out, found, title(result, target)))


def _tables(found: Profile, plan: DraftPlan) -> list[Table]:
    by_size: dict[int, dict[int, VerifyCost]] = {}
    for cost in found.verify:
        by_size.setdefault(cost.tokens, {})[cost.context] = cost
    contexts = list(dict.fromkeys(cost.context for cost in found.verify))
    verify = Table("T", *(f"verify(T) at {n}, ms (ratio)" for n in contexts))
    for size, costs in by_size.items():
        cells = [f"{costs[n].seconds.median * 1e3:.1f} ({costs[n].ratio:.2f})" for n in contexts]
        verify.add_row(str(size), *cells)
    lengths = sorted({cost.length for cost in found.draft})
    draft = Table("draft W", *(f"L = {length}, ms" for length in lengths))
    for width in dict.fromkeys(cost.width for cost in found.draft):
        costs_of_width = [cost for cost in found.draft if cost.width == width]
        draft.add_row(str(width), *(f"{c.seconds.median * 1e3:.2f}" for c in costs_of_width))
    step = Table(f"step, W {plan.shape.width} L {plan.shape.length} N {plan.num_nodes}", "ms")
    for name, part in {**found.step.parts, "overhead": found.step.overhead}.items():
        step.add_row(name, f"{part.median * 1e3:.2f}")
    return [verify, draft, step]
