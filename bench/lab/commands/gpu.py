"""Compare methods with mlx-lm on a GPU, text by text, greedily and at temperature 1.

In 16 bits a few texts may differ: the table counts them, and the exit code is 0.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from rich.table import Table

from mlx_redrafter.bench.lab.arms import compared_arms, decode_in_turns, make_turns
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
from mlx_redrafter.bench.report import summarise
from mlx_redrafter.bench.runs import STOCK, Arm, TimedRun, drafted_arm
from mlx_redrafter.bench.turns import reference_arm
from mlx_redrafter.cli.bench_output import parse_shapes, parse_temps, progress, show
from mlx_redrafter.machines.leading import target_of


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    add_prompts(parser)
    add_rounds(parser, max_tokens=128)
    parser.add_argument("--shapes", default="1x5x5,4x5x16", help="WIDTHxLENGTHxNODES, with commas")
    parser.add_argument("--temps", default="0,1", help="temperatures, with commas")
    add_out(parser, can_resume=True)


def run(arguments: Namespace) -> None:
    """Run the command."""
    model, tokenizer, drafter = load_pair(arguments)
    plans, encoded = parse_shapes(arguments.shapes), read_given_prompts(arguments, tokenizer)
    more = {"shapes": arguments.shapes, "temps": arguments.temps}
    recording = begin_recording("gpu", arguments, drafter, encoded, **more)
    for temp in parse_temps(arguments.temps):
        settings = replace(make_settings(arguments, model, tokenizer, drafter), temp=temp)
        arms = compared_arms(settings, plans)
        arms["no pass compiled"] = _without_compiled(model, drafted_arm(settings, plans[-1]))
        group = f"temperature {temp:g}"
        turns = make_turns(encoded, arguments.repeats, group)
        with progress(group) as on_progress:
            decode_in_turns(arms, turns, recording, arguments.cool_down, on_progress)
        runs = [one for one in recording.runs if one.group == group]
        show(_table(group, runs, reference_arm(settings)))
    recording.finish(found=None)


def _without_compiled(model: Any, arm: Arm) -> Arm:
    def decode(ids: list[int]) -> Iterator[Any]:
        target = target_of(model)
        compiled, target.compiled = target.compiled, None
        try:
            yield from arm(ids)
        finally:
            target.compiled = compiled

    return decode


def _table(group: str, runs: Sequence[TimedRun], reference: str) -> Table:
    """Make a table of speeds relative to mlx-lm in the same turn."""
    stock = {one.turn: one.seconds_per_token for one in runs if one.arm == STOCK and one.is_timed}
    table = Table(group, "x mlx-lm (least to most)", "tokens/s", "tokens/step", "texts differ")
    for row in summarise(runs, reference):
        timed = [one for one in runs if one.arm == row.arm and one.is_timed and one.turn in stock]
        ratios = [stock[one.turn] / one.seconds_per_token for one in timed]
        if row.tokens_per_second is None or not ratios:
            continue
        speed = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        steps = "" if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}"
        different = "" if row.num_different is None else str(row.num_different)
        table.add_row(row.arm, speed, f"{row.tokens_per_second.median:.1f}", steps, different)
    return table
