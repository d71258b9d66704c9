"""Compare the default with fixed draft shapes: the gain missed by not choosing the best by hand.

The exit code is 1 if a text differs from the target's own.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from mlx_redrafter.bench.lab.options import (
    add_out,
    add_pair,
    add_prompts,
    add_rounds,
    add_sampling,
    begin_recording,
    load_pair,
    make_settings,
    read_given_prompts,
)
from mlx_redrafter.bench.lab.plots import plot_regret
from mlx_redrafter.bench.lab.regret import measure_regret
from mlx_redrafter.bench.plots import count_texts, title
from mlx_redrafter.bench.report import num_different
from mlx_redrafter.cli.bench_output import draw, progress, refuse_texts, show, show_speeds, warn


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    add_prompts(parser)
    add_rounds(parser)
    add_sampling(parser)
    add_out(parser, can_resume=True)


def run(arguments: Namespace) -> None:
    """Run the command."""
    target, tokenizer, drafter = load_pair(arguments)
    encoded = read_given_prompts(arguments, tokenizer)
    settings = make_settings(arguments, target, tokenizer, drafter)
    more = {"temp": arguments.temp, "seed": arguments.seed}
    recording = begin_recording("regret", arguments, drafter, encoded, **more)
    with progress("Turns") as on_progress:
        found = measure_regret(
            settings, encoded, arguments.repeats, recording, arguments.cool_down,
            arguments.max_repeated, on_progress,
        )  # fmt: skip
    show_speeds(found.rows, "by mlx-lm")
    ratio = found.ratio
    show(f"auto / {found.best}: {ratio.median:.3f}, {ratio.span('.3f') or 'one text'}")
    if (out := arguments.out) is not None:
        heading = title(recording.result, target, count_texts(recording.result["configuration"]))
        draw(lambda: [plot_regret(out.with_suffix(".png"), found, heading)])
    warn(recording.result["disturbances"])
    refuse_texts(num_different(found.rows))
