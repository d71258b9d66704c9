"""Measure texts that repeat their prompt: a document and source code, with edits.

A logits processor makes every decoding method write the edited text, as small models do not copy.
The exit code is 1 if a text differs from the target's own.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from mlx_redrafter.bench.lab.copying import compare_copies, make_copies
from mlx_redrafter.bench.lab.options import (
    add_out,
    add_pair,
    at_least,
    describe_pair,
    load_pair,
    make_settings,
)
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import num_different
from mlx_redrafter.cli.bench_output import progress, refuse_texts, show, speed_table, warn


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    parser.add_argument("-m", "--max-tokens", type=at_least(2), default=400)
    parser.add_argument("--repeats", type=at_least(1), default=3, help="rounds per text")
    add_out(parser, can_resume=True)


def run(arguments: Namespace) -> None:
    """Run the command."""
    target, tokenizer, drafter = load_pair(arguments)
    configuration = {
        **describe_pair(arguments, drafter),
        "max_tokens": arguments.max_tokens,
        "repeats": arguments.repeats,
    }
    recording = Recording(arguments.out, "copy", configuration, arguments.resume)
    settings = make_settings(arguments, target, tokenizer, drafter)
    copies = make_copies(tokenizer)
    with progress("Turns") as on_progress:
        found = compare_copies(settings, copies, arguments.repeats, recording, on_progress)
    for name, rows in found.items():
        show(speed_table(rows, name))
    warn(recording.result["disturbances"])
    refuse_texts(num_different(row for rows in found.values() for row in rows))
