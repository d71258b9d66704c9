"""``redrafter-mlx bench speed``, ``throughput`` and ``share``: speed of texts and batches."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_options import (
    Out,
    PromptFile,
    Prompts,
    Resume,
    Rounds,
    TextTokens,
    begin,
)
from mlx_redrafter.cli.bench_output import (
    draw,
    parse_count,
    parse_ints,
    parse_shapes,
    parse_temps,
    progress,
    refuse_texts,
    show,
    warn,
)
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.cli.text_options import Temp
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams

if TYPE_CHECKING:
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.speed import Comparison, SpeedRow, Work

BatchSizes = Annotated[str, "Texts at the same time, such as 1,2,4-6."]


def speed(
    prompts: Prompts,
    pair: Pair,
    rounds: Rounds,
    *,
    temps: Annotated[str, "Temperatures."] = "0,1",
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the prompts, such as 1k,8k,32k: longer ones are cut, and shorter ones "
            "get other prompts before them.",
            show_default="as published",
        ),
    ] = None,
    batch_sizes: BatchSizes = "1,4",
    server: Annotated[
        list[str] | None,
        "Also measure an OpenAI server with the same model, as NAME=URL or NAME=URL#MODEL "
        "such as mlx-lm=http://127.0.0.1:8080/v1; may be repeated.",
    ] = None,
    api_key: Annotated[str | None, "Key for the servers, if they need one."] = None,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Compare drafted decoding with plain decoding and with other servers, on published prompts.

    Prompts may be a file of Spec-Bench or SPEED-Bench, or a dataset such as
    nvidia/SPEED-Bench:qualitative. All methods decode every batch in turns. Beside the JSON file
    this writes its tables (.md) and a plot (.png). The exit code is 1 if a drafted text differs
    from the plain one.
    """
    chosen, sizes = parse_temps(temps), parse_ints(batch_sizes)
    lengths = [None] if contexts is None else [parse_count(one) for one in contexts.split(",")]
    from mlx_redrafter.bench.openai_server import find_server
    from mlx_redrafter.bench.runs import AUTO, CommonSettings
    from mlx_redrafter.bench.speed import Comparison, Setting, all_prompts
    from mlx_redrafter.checkpoint_files import write_text

    servers = [find_server(one, api_key) for one in server or ()]
    if len({one.name for one in servers}) < len(servers):
        raise ConfigError("expected a different name for every --server; rename one")
    target, tokenizer, drafter = pair.load()
    encoded = {length: prompts.encode(tokenizer, length) for length in lengths}
    recording = begin(
        "speed", out, resume, pair, drafter, prompts.prompts, encoded[lengths[0]],
        temps=list(chosen),
        contexts=lengths,
        batch_sizes=list(sizes),
        servers=[one.name for one in servers],
        **asdict(rounds),
    )  # fmt: skip
    work = [
        batch
        for length, some in encoded.items()
        for size in sizes
        for temp in chosen
        for batch in all_prompts(Setting(temp, length, size), some, rounds.repeats)
    ]
    settings = CommonSettings(target, tokenizer, drafter, rounds.max_tokens)
    compared = Comparison(settings, servers, cool_down=rounds.cool_down)
    rows = _measure(work, compared, recording)
    if out is not None:
        write_text(out.with_suffix(".md"), "\n".join(recording.result["tables"]) + "\n")
    refuse_texts(sum(row.num_different or 0 for row in rows if row.method == AUTO))


def throughput(
    prompts: PromptFile,
    pair: Pair,
    *,
    batch_sizes: BatchSizes = "1,2,4,8,16",
    shapes: Annotated[
        str, "Fixed draft shapes to measure, each WIDTHxLENGTH or WIDTHxLENGTHxNODES."
    ] = "1x5,2x5,4x5",
    max_tokens: TextTokens = 64,
    rounds: Annotated[int, "Number of batches of each size and method."] = 5,
    temp: Temp = 0.0,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Compare batch generation by mlx-lm, plain decoding, the default and fixed draft shapes.

    The exit code is 1 if a text differs from the target's own.
    """
    SamplingParams(temp)
    sizes, plans = parse_ints(batch_sizes), parse_shapes(shapes)
    for name, value in (("max_tokens", max_tokens), ("rounds", rounds)):
        check_int(name, value, 1)
    target, tokenizer, drafter = pair.load()
    from mlx_redrafter.bench.runs import CommonSettings
    from mlx_redrafter.bench.speed import Comparison, Setting, next_prompts

    encoded = Prompts(prompts).encode(tokenizer)
    recording = begin(
        "throughput", out, resume, pair, drafter, prompts, encoded,
        max_tokens=max_tokens,
        repeats=rounds,
        temp=temp,
        shapes=shapes,
        batch_sizes=list(sizes),
    )  # fmt: skip
    work = [
        batch
        for size in sizes
        for batch in next_prompts(Setting(temp, None, size), encoded, rounds)
    ]
    settings = CommonSettings(target, tokenizer, drafter, max_tokens)
    compared = Comparison(settings, plans=plans, has_stock=True)
    rows = _measure(work, compared, recording)
    refuse_texts(sum(row.num_different or 0 for row in rows))


def _measure(work: Work, compared: Comparison, recording: Recording) -> list[SpeedRow]:
    """Measure, print the table, draw the plot, and return the rows over all categories."""
    from mlx_redrafter.bench.plots import count_texts, plot_speed, title
    from mlx_redrafter.bench.speed import measure_speed
    from mlx_redrafter.bench.speed_page import cells, columns, speed_tables

    with progress("Batches") as on_progress:
        rows = measure_speed(work, compared, recording, on_progress)
    tables = speed_tables(rows, compared.baseline)
    recording.finish(bool(compared.servers), rows=rows, tables=tables)
    found = [row for row in rows if not row.category]
    table = Table(*columns(compared.baseline))
    for row in found:
        table.add_row(*cells(row))
    show(table)
    result: dict[str, Any] = recording.result
    warn(result["disturbances"])
    if recording.path is not None:
        heading = title(result, compared.settings.model, count_texts(result["configuration"]))
        path = recording.path.with_suffix(".png")
        draw(lambda: [plot_speed(path, found, heading, compared.baseline)])
    return found


def share(
    result: Annotated[Path, typer.Argument(help="JSON file of `bench speed`.")],
    out: Annotated[Path, "Markdown file to write, for a pull request.", "-o"],
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
