"""Request texts from a running server with many clients, some of which disconnect.

The exit code is 1 if an answer differs from the text of this pair.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import typer

from mlx_redrafter.bench.lab.options import add_pair, at_least, load_pair
from mlx_redrafter.bench.lab.serving import make_cases, run_clients
from mlx_redrafter.cli.bench_output import progress
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import DataError

# Beginnings that share a prefix, or are the beginning of another.
PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a king",
    "The old man opened the door and",
    "The old man opened the window and",
    "It was a dark night. " * 8,
    "She said nothing",
)


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add_pair(parser)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="server without a key")
    parser.add_argument("--requests", type=at_least(1), default=1000)
    parser.add_argument("--clients", type=at_least(1), default=8, help="concurrent clients")
    parser.add_argument("-m", "--max-tokens", type=at_least(1), default=40)
    parser.add_argument("--seed", type=at_least(0), default=0)


def run(arguments: Namespace) -> None:
    """Run the command."""
    model, tokenizer, drafter = load_pair(arguments)
    url, count, clients = arguments.url, arguments.requests, arguments.clients
    seed = arguments.seed
    cases = make_cases(Engine(model, tokenizer, drafter), PROMPTS, arguments.max_tokens)
    # A first round fills the caches, so that the second shows whether memory grows.
    with progress("Requests") as on_progress:
        first = run_clients(url, cases, max(count // 5, 1), clients, seed + 1, on_progress)
    with progress("Requests") as on_progress:
        second = run_clients(url, cases, count, clients, seed, on_progress)
    typer.echo(
        f"{second.num_right} right, {second.num_gone} gone, {len(second.wrong)} wrong in "
        f"{second.seconds:.1f} s; the server's memory {first.gauges['device_bytes'] / 1e6:.1f} MB "
        f"before and {second.gauges['device_bytes'] / 1e6:.1f} MB after, of which caches "
        f"{first.gauges['prompt_cache_bytes'] / 1e6:.1f} and "
        f"{second.gauges['prompt_cache_bytes'] / 1e6:.1f} MB"
    )
    for case, answer in [*first.wrong, *second.wrong][:1]:
        raise DataError(f"expected {case.text!r} for {case.body}, found {answer!r}")
