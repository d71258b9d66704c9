"""``redrafter-mlx bench``: measurements on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.checkpoint_files import write_text
from mlx_redrafter.checkpoints.bundled import checkpoint_name
from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_options import (
    Output,
    PromptFile,
    Prompts,
    Resume,
    Rounds,
    ShortRounds,
    TextTokens,
    load_settings,
)
from mlx_redrafter.cli.bench_output import (
    draw,
    parse_count,
    parse_ints,
    parse_shapes,
    parse_temps,
    progress,
    refuse_texts,
    show_lines,
    warn,
)
from mlx_redrafter.cli.machines import launched_group
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.cli.names import find_model
from mlx_redrafter.cli.text_options import Overwrite, Temp
from mlx_redrafter.cli.typer_app import Application
from mlx_redrafter.destinations import check_destination
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.interrupts import keeping

if TYPE_CHECKING:
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.speed import Comparison, Work
    from mlx_redrafter.bench.sweep import Grid

app = Application(help="Measure the speed of drafting on this machine.", no_args_is_help=True)

BatchSizes = Annotated[str, "Texts at the same time, such as 1,2,4-6."]


@app.command()
def speed(
    prompts: Prompts,
    pair: Pair,
    rounds: Rounds,
    *,
    temps: Annotated[str, "Temperatures."] = "0,1",
    contexts: Annotated[
        str | None,
        "Tokens of the prompts, such as 1k,8k,32k: longer ones are cut, and shorter ones get other "
        "prompts before them. By default prompts keep their lengths.",
    ] = None,
    batch_sizes: BatchSizes = "1,4",
    server: Annotated[
        list[str] | None,
        "Also measure an OpenAI server with the same model, as NAME=URL or NAME=URL#MODEL "
        "such as mlx-lm=http://127.0.0.1:8080/v1; may be repeated.",
    ] = None,
    api_key: Annotated[str | None, "Key for the servers, if they need one."] = None,
    output: Output,
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
    from mlx_redrafter.bench.speed import Comparison, Setting, all_prompts

    output.check("speed", [pair.model, pair.drafter, prompts.prompts], output.beside(".md", ".png"))
    servers = [find_server(one, api_key) for one in server or ()]
    if len({one.name for one in servers}) < len(servers):
        raise ConfigError("expected a different name for every --server; rename one")
    settings = load_settings(pair, rounds.max_tokens)
    encoded = {length: prompts.encode(settings, length) for length in lengths}
    work = {
        (one := Setting(temp, length, size)): all_prompts(one, some, rounds.repeats)
        for length, some in encoded.items()
        for size in sizes
        for temp in chosen
    }
    recording = output.begin(
        "speed", pair, settings, prompts.prompts, encoded[lengths[0]],
        temps=list(chosen),
        contexts=lengths,
        batch_sizes=list(sizes),
        servers=[one.name for one in servers],
        **asdict(rounds),
    )  # fmt: skip
    compared = Comparison(settings, servers, cool_down=rounds.cool_down)
    _measure(work, compared, recording, *output.beside(".md"))


@app.command()
def share(
    result: Annotated[Path, typer.Argument(help="JSON file of `bench speed`.")],
    out: Annotated[Path, "Markdown file to write, for a pull request.", "-o"],
    overwrite: Overwrite = False,
) -> None:
    """Write a page to publish: machine, versions, conditions and tables of a result.

    The page has no path, no address and no text of a prompt or an answer.
    """
    from mlx_redrafter.bench.report import is_page, page
    from mlx_redrafter.bench.result_file import read_result

    check_destination(out, [result], is_page(out), overwrite, is_folder=False)
    text = page(read_result(result, "speed"))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    typer.echo(f"wrote {out}", err=True)


@app.command()
def compare(
    prompts: Prompts,
    pair: Pair,
    rounds: Rounds,
    *,
    stock_draft_model: Annotated[
        str | None, "Also measure mlx-lm's own speculative decoding with this draft model."
    ] = None,
    shapes: Annotated[
        str,
        "Fixed draft shapes to measure, each WIDTHxLENGTH or WIDTHxLENGTHxNODES of a "
        "tree, or beam:WIDTHxLENGTH for merged beams.",
    ] = "beam:4x5,4x5x9",
    temp: Temp = 0.0,
    output: Output,
) -> None:
    """Compare stock mlx-lm, plain decoding, fixed draft shapes and the default.

    Every prompt is decoded with every method, and speeds are relative to stock mlx-lm. The exit
    code is 1 if a text differs from the target's own.
    """
    SamplingParams(temp)
    plans = parse_shapes(shapes)
    if stock_draft_model is not None and launched_group() is not None:
        raise ConfigError("stock_draft_model is not supported on several machines; leave it out")
    inputs = [pair.model, pair.drafter, stock_draft_model, prompts.prompts]
    output.check("compare", inputs, output.beside(".png"))
    if stock_draft_model is not None:
        stock_draft_model = find_model(stock_draft_model, pair.yes)
    settings = load_settings(pair, rounds.max_tokens)
    from mlx_redrafter.bench.speed import Comparison, Setting, all_prompts
    from mlx_redrafter.bench.turns import arm_name
    from mlx_redrafter.checkpoints.loading import load

    assert settings.drafter is not None
    plans = [plan.within(settings.drafter.max_length) for plan in plans]
    draft_model = None if stock_draft_model is None else load(stock_draft_model)[0]
    encoded = prompts.encode(settings)
    recording = output.begin(
        "compare", pair, settings, prompts.prompts, encoded,
        stock_draft_model=stock_draft_model and checkpoint_name(stock_draft_model),
        shapes={arm_name(plan): plan.options for plan in plans},
        temp=temp,
        **asdict(rounds),
    )  # fmt: skip
    setting = Setting(temp, None, 1)
    work = {setting: all_prompts(setting, encoded, rounds.repeats)}
    compared = Comparison(settings, (), plans, "one by one", draft_model, rounds.cool_down)
    _measure(work, compared, recording)


@dataclass(frozen=True)
class GridOptions:
    widths: Annotated[str, "Beam widths, such as 1-4,8."] = "1-4"
    lengths: Annotated[str, "Beam lengths, counting the root."] = "2-5"
    nodes: Annotated[str | None, "Tree nodes with top_n; by default the usual number."] = None
    selections: Annotated[
        str, "top_n for the most probable nodes, beam for merged beams, or both."
    ] = "top_n,beam"
    temps: Annotated[str, "Temperatures."] = "0"

    def read(self) -> Grid:
        from mlx_redrafter.bench.sweep import Grid

        selections: Any = dict.fromkeys(part.strip() for part in self.selections.split(","))
        return Grid(
            parse_ints(self.widths),
            parse_ints(self.lengths),
            (None,) if self.nodes is None else parse_ints(self.nodes),
            tuple(selections),  # each checked by its plans
            parse_temps(self.temps),
        )


@app.command()
def sweep(
    prompts: Prompts,
    out: Annotated[Path, "Folder for JSON and PNG files.", "-o"],
    pair: Pair,
    shapes: GridOptions,
    rounds: ShortRounds,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure a grid of fixed draft shapes, and draw maps of the speed.

    Speeds are relative to stock mlx-lm. The exit code is 1 if a text differs from the target's own.
    """
    grid = shapes.read()
    output = Output(out / "sweep.json", resume, overwrite)
    maps = sorted(out.glob("speedup-*.png"))
    output.check("sweep", [pair.model, pair.drafter, prompts.prompts], maps)
    from mlx_redrafter.bench.plots import plot_sweep, title
    from mlx_redrafter.bench.report import num_different, tabulate
    from mlx_redrafter.bench.sweep import sweep as measure

    settings = load_settings(pair, rounds.max_tokens)
    encoded = prompts.encode(settings)
    recording = output.begin(
        "sweep", pair, settings, prompts.prompts, encoded,
        grid={name: list(values) for name, values in asdict(grid).items()},
        **asdict(rounds),
    )  # fmt: skip
    with keeping(partial(_what_is_kept, recording)), progress("Turns") as on_progress:
        points = measure(
            settings, grid, encoded, rounds.repeats, recording, rounds.cool_down, on_progress
        )
    for temp in grid.temps:
        rows = [point.row for point in points if point.temp == temp]
        show_lines(tabulate(rows), f"temperature {temp:g}")
    draw(lambda: plot_sweep(out, points, title(recording.result, settings.model)))
    warn(recording.result["disturbances"])
    refuse_texts(num_different([point.row for point in points]))


@app.command()
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
    output: Output,
) -> None:
    """Compare batch generation by mlx-lm, plain decoding, the default and fixed draft shapes.

    The exit code is 1 if a text differs from the target's own.
    """
    SamplingParams(temp)
    sizes, plans = parse_ints(batch_sizes), parse_shapes(shapes)
    for name, value in (("max_tokens", max_tokens), ("rounds", rounds)):
        check_int(name, value, 1)
    output.check("throughput", [pair.model, pair.drafter, prompts], output.beside(".png"))
    settings = load_settings(pair, max_tokens)
    from mlx_redrafter.bench.speed import Comparison, Setting, next_prompts

    encoded = Prompts(prompts).encode(settings)
    recording = output.begin(
        "throughput", pair, settings, prompts, encoded,
        max_tokens=max_tokens,
        repeats=rounds,
        temp=temp,
        shapes=shapes,
        batch_sizes=list(sizes),
    )  # fmt: skip
    batches = [Setting(temp, None, size) for size in sizes]
    work = {one: next_prompts(one, encoded, rounds) for one in batches}
    _measure(work, Comparison(settings, plans=plans, stock="batch"), recording)


def _what_is_kept(recording: Recording) -> str:
    if recording.path is None:
        return "stopped; nothing is kept without --out"
    return f"stopped; {recording.path} has the runs so far, add --resume to go on"


def _measure(work: Work, compared: Comparison, recording: Recording, *pages: Path) -> None:
    """Measure, print the tables, also to pages, draw the plot, and refuse different texts."""
    from mlx_redrafter.bench.plots import plot_speed, title
    from mlx_redrafter.bench.report import num_different, speed_tables, tabulate
    from mlx_redrafter.bench.speed import measure_speed

    with keeping(partial(_what_is_kept, recording)), progress("Batches") as on_progress:
        rows = measure_speed(work, compared, recording, on_progress)
    tables = speed_tables(rows, compared.baseline)
    recording.finish(bool(compared.servers), rows=rows, tables=tables)
    found = [row for row in rows if not row.category]
    show_lines(tabulate(found, compared.baseline), "all prompts")
    if by_category := [row for row in rows if row.category]:
        show_lines(tabulate(by_category, compared.baseline), "by category")
    result: dict[str, Any] = recording.result
    if (seconds := result.get("calibration_seconds")) is not None:
        typer.echo(
            f"auto: timing the draft shapes took {seconds:.1f} s, which no answer's time includes"
        )
    warn(result["disturbances"])
    if recording.path is not None:
        heading, path = title(result, compared.settings.model), recording.path.with_suffix(".png")
        draw(lambda: [plot_speed(path, found, heading, compared.baseline)])
    for page in pages:
        write_text(page, "\n".join(tables) + "\n")
    refuse_texts(num_different(row for row in found if not row.arm.endswith("(server)")))
