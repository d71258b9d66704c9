"""Measure a grid of fixed draft shapes, and draw maps of the speed.

Speeds are relative to stock mlx-lm. The exit code is 1 if a text differs from the target's own.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from mlx_redrafter.bench.lab.figures import count_texts, draw, title
from mlx_redrafter.bench.lab.options import (
    add_out,
    add_pair,
    add_prompts,
    add_rounds,
    describe_pair,
    describe_rounds,
    load_pair,
    make_settings,
    parse_ints,
    parse_names,
    parse_temps,
    read_given_prompts,
)
from mlx_redrafter.bench.lab.plots import plot_sweep
from mlx_redrafter.bench.lab.sweep import Grid, sweep
from mlx_redrafter.bench.prompts import describe_prompts
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import num_different
from mlx_redrafter.cli.bench_output import progress, refuse_texts, show, speed_table, warn
from mlx_redrafter.errors import ConfigError


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    add_prompts(parser)
    add_rounds(parser)
    parser.add_argument("--widths", default="1-4", help="beam widths, such as 1-4,8")
    parser.add_argument("--lengths", default="2-5", help="beam lengths, counting the root")
    parser.add_argument("--nodes", help="tree nodes with top_n")
    parser.add_argument("--selections", default="top_n,beam", help="beam for merged beams")
    parser.add_argument("--temps", default="0", help="temperatures")
    add_out(parser, "folder of JSON and PNG files", can_resume=True)


def run(arguments: Namespace) -> None:
    """Run the command."""
    out, nodes = arguments.out, arguments.nodes
    if out is None:
        raise ConfigError("expected a folder for the result, got none; add --out FOLDER")
    grid = Grid(
        parse_ints(arguments.widths),
        parse_ints(arguments.lengths),
        (None,) if nodes is None else parse_ints(nodes),
        parse_names(arguments.selections, ("top_n", "beam")),  # type: ignore[arg-type]
        parse_temps(arguments.temps),
    )
    target, tokenizer, drafter = load_pair(arguments)
    encoded = read_given_prompts(arguments, tokenizer)
    configuration = {
        **describe_pair(arguments, drafter),
        **describe_prompts(arguments.prompts, encoded),
        "grid": {name: list(values) for name, values in asdict(grid).items()},
        **describe_rounds(arguments),
    }
    settings = make_settings(arguments, target, tokenizer, drafter)
    recording = Recording(out / "sweep.json", "sweep", configuration, arguments.resume)
    with progress("Turns") as on_progress:
        points = sweep(
            settings, grid, encoded, arguments.repeats, recording, arguments.cool_down,
            arguments.max_repeated, on_progress,
        )  # fmt: skip
    for temp in grid.temps:
        rows = [point.row for point in points if point.temp == temp]
        show(speed_table(rows, f"temperature {temp:g}"))
    heading = title(recording.result, target, count_texts(configuration))
    draw(lambda: plot_sweep(out, points, heading))
    warn(recording.result["disturbances"])
    refuse_texts(num_different([point.row for point in points]))
