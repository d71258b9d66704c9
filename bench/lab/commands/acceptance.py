"""Measure tokens per step of a chain of 4 drafts and a tree of 8, from the most probable nodes.

The exit code is 1 if a text differs from the target's own.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from mlx_redrafter.bench.lab.options import (
    add_out,
    add_pair,
    add_prompts,
    add_rounds,
    begin_recording,
    load_pair,
    make_settings,
    read_given_prompts,
)
from mlx_redrafter.bench.report import num_different
from mlx_redrafter.bench.sweep import Grid, sweep
from mlx_redrafter.cli.bench_output import (
    parse_temps,
    progress,
    refuse_texts,
    show_speeds,
    warn,
)


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    add_prompts(parser)
    add_rounds(parser, max_tokens=80, repeats=1)
    parser.add_argument("--temps", default="0,0.8", help="temperatures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-couple", action="store_true", help="rank drafts without the target's random numbers"
    )
    add_out(parser, can_resume=True)


def run(arguments: Namespace) -> None:
    """Run the command."""
    grid = Grid((1, 4), (5,), selections=("top_n",), temps=parse_temps(arguments.temps))
    target, tokenizer, drafter = load_pair(arguments)
    encoded = read_given_prompts(arguments, tokenizer)
    couple = not arguments.no_couple
    settings = make_settings(arguments, target, tokenizer, drafter, couple=couple)
    more = {"temps": list(grid.temps), "seed": arguments.seed, "couple": couple}
    recording = begin_recording("sweep", arguments, drafter, encoded, **more)
    with progress("Turns") as on_progress:
        points = sweep(
            settings, grid, encoded, arguments.repeats, recording, arguments.cool_down,
            arguments.max_repeated, on_progress,
        )  # fmt: skip
    for temp in grid.temps:
        rows = [point.row for point in points if point.temp == temp]
        show_speeds(rows, f"temperature {temp:g}")
    warn(recording.result["disturbances"])
    refuse_texts(num_different([point.row for point in points]))
