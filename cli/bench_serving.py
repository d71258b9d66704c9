"""``redrafter-mlx bench serving``: many clients of a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_output import progress
from mlx_redrafter.cli.model_options import WritingPair
from mlx_redrafter.cli.text_options import MaxTokens, Seed
from mlx_redrafter.errors import DataError

# Beginnings that share a prefix, or begin in another's.
PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a king",
    "The old man opened the door and",
    "The old man opened the window and",
    "It was a dark night. " * 8,
    "She said nothing",
)


def serving(
    pair: WritingPair,
    *,
    url: Annotated[str, typer.Option(help="Address of the server of this pair, without a key.")] = (
        "http://127.0.0.1:8080"
    ),
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 1000,
    clients: Annotated[int, typer.Option(help="Number of clients at once.")] = 8,
    max_tokens: MaxTokens = 40,
    seed: Seed = 0,
) -> None:
    """Ask a running server for texts from many clients, some of whom go away.

    The exit code is 1 if an answer is not the text of this pair.
    """
    for name, value in (("requests", requests), ("clients", clients), ("max_tokens", max_tokens)):
        check_int(name, value, 1)
    check_int("seed", seed, 0, 2**32 - 1)
    model, tokenizer, drafter = pair.load_writer()
    from mlx_redrafter.bench.serving import make_cases, run_clients
    from mlx_redrafter.engine.engine import Engine

    engine = Engine(model, tokenizer, drafter)
    cases = make_cases(engine, PROMPTS, max_tokens)
    # A first round fills the caches, so that the second shows whether memory grows.
    with progress("Requests") as on_progress:
        first = run_clients(url, cases, max(requests // 5, 1), clients, seed + 1, on_progress)
    with progress("Requests") as on_progress:
        second = run_clients(url, cases, requests, clients, seed, on_progress)
    typer.echo(
        f"{second.num_right} right, {second.num_gone} gone, {len(second.wrong)} wrong in "
        f"{second.seconds:.1f} s; the server's memory {first.gauges['device_bytes'] / 1e6:.1f} MB "
        f"before and {second.gauges['device_bytes'] / 1e6:.1f} MB after, of which caches "
        f"{first.gauges['prompt_cache_bytes'] / 1e6:.1f} and "
        f"{second.gauges['prompt_cache_bytes'] / 1e6:.1f} MB"
    )
    for case, answer in [*first.wrong, *second.wrong][:1]:
        raise DataError(f"expected {case.text!r} for {case.body}, found {answer!r}")
