"""``redrafter-mlx bench speed`` and ``bench share``: speed on published prompts, to compare."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mlx_redrafter.cli.bench_options import Out, Prompts, Resume, Rounds, describe_pair
from mlx_redrafter.cli.bench_output import (
    draw,
    parse_count,
    parse_ints,
    parse_temps,
    progress,
    refuse_texts,
    show,
    warn,
)
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.errors import ConfigError


def speed(
    prompts: Prompts,
    pair: Pair,
    rounds: Rounds,
    *,
    temps: Annotated[str, typer.Option(help="Temperatures.")] = "0,1",
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the prompts, such as 1k,8k,32k: longer ones are cut, and shorter ones "
            "get other prompts before them.",
            show_default="as published",
        ),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Texts at the same time.")] = "1,4",
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="Also measure an OpenAI server with the same model, as NAME=URL or NAME=URL#MODEL "
            "such as mlx-lm=http://127.0.0.1:8080/v1; may be repeated.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key for the servers, if they need one.", show_default=False),
    ] = None,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Compare drafted decoding with plain decoding and with other servers, on published prompts.

    Prompts may be a file of Spec-Bench or SPEED-Bench, or a dataset such as
    nvidia/SPEED-Bench:qualitative. All methods decode every batch in turns. Beside the JSON file
    this writes its tables (.md) and a plot (.png). The exit code is 1 if a drafted text differs
    from the plain one.
    """
    chosen = parse_temps(temps), parse_ints(batch_sizes)
    lengths = [None] if contexts is None else [parse_count(one) for one in contexts.split(",")]
    from mlx_redrafter.bench.openai_server import find_server
    from mlx_redrafter.bench.plots import count_texts, plot_speed, title
    from mlx_redrafter.bench.prompts import describe_prompts
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.runs import AUTO, CommonSettings
    from mlx_redrafter.bench.speed import measure_speed
    from mlx_redrafter.bench.speed_page import COLUMNS, cells, speed_tables
    from mlx_redrafter.checkpoint_files import write_text

    servers = [find_server(one, api_key) for one in server or ()]
    if len({one.name for one in servers}) < len(servers):
        raise ConfigError("expected a different name for every --server; rename one")
    target, tokenizer, drafter = pair.load()
    encoded = {length: prompts.encode(tokenizer, length) for length in lengths}
    configuration = {
        **describe_pair(pair, drafter),
        **describe_prompts(prompts.prompts, encoded[lengths[0]]),
        **asdict(rounds),
        "temps": list(chosen[0]),
        "contexts": lengths,
        "batch_sizes": list(chosen[1]),
        "servers": [one.name for one in servers],
    }
    settings = CommonSettings(target, tokenizer, drafter, rounds.max_tokens)
    recording = Recording(out, "speed", configuration, resume)
    with progress("Batches") as on_progress:
        rows = measure_speed(
            settings, encoded, *chosen, servers, rounds.repeats, recording, rounds.cool_down,
            on_progress,
        )  # fmt: skip
    table = Table(*COLUMNS)
    for row in rows:
        if not row.category:
            table.add_row(*cells(row))
    show(table)
    warn(recording.result["disturbances"])
    if out is not None:
        text = speed_tables(rows)
        write_text(out.with_suffix(".md"), text)
        heading = title(recording.result, target, count_texts(configuration))
        draw(lambda: [plot_speed(out.with_suffix(".png"), rows, heading)])
    refuse_texts(sum(row.num_different for row in rows if row.method == AUTO and not row.category))


def share(
    result: Annotated[Path, typer.Argument(help="JSON file of `bench speed`.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Markdown file to write, for a pull request.")
    ],
) -> None:
    """Write a page to publish: machine, versions, conditions and tables of a result.

    The page has no path, no address and no text of a prompt or an answer.
    """
    from mlx_redrafter.bench.result_file import read_result
    from mlx_redrafter.bench.speed_page import page
    from mlx_redrafter.checkpoint_files import write_text

    text = page(read_result(result, "speed"))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    typer.echo(f"wrote {out}", err=True)
