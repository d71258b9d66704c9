"""``redrafter-mlx bench``: measurements on this machine, and the tools they need."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mlx_redrafter.cli import options
from mlx_redrafter.config import TreeShape, check_int
from mlx_redrafter.errors import ConfigError

app = typer.Typer(
    help="Measure what drafting gains here, and where the time goes.", no_args_is_help=True
)

Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="JSON file for the result.", show_default=False),
]
PROMPT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, and the old man who lived by the sea said to his daughter:"
)


@app.command()
def widen(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A small Llama.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    parameters: Annotated[
        str, typer.Option(help="About how many the copy gets, such as 0.2B or 150M.")
    ] = "0.2B",
    layers: Annotated[int | None, typer.Option(help="Layers; new ones add nothing.")] = None,
    drafter: Annotated[str | None, typer.Option(help="The small model's drafter.")] = None,
    drafter_out: Annotated[Path | None, typer.Option(help="Folder for its copy.")] = None,
    context: Annotated[int | None, typer.Option(help="Replaces max_position_embeddings.")] = None,
    seed: Annotated[int, typer.Option(help="Of the arbitrary weights.")] = 0,
) -> None:
    """Widen a small Llama without changing what it computes, for speed work.

    Text and acceptance stay the small model's; a step costs what a large model's does.
    """
    if (drafter is None) != (drafter_out is None):
        raise ConfigError("--drafter and --drafter-out belong together; give both or neither")
    count = parse_count(parameters)
    from mlx_redrafter.bench.widen import widen_drafter, widen_target

    shape = widen_target(source, destination, count, layers, context, seed)
    typer.echo(f"{destination}: {shape.num_parameters / 1e6:.1f}M parameters, {shape}")
    if drafter is not None and drafter_out is not None:
        config = widen_drafter(drafter, drafter_out, shape.hidden_size, seed)
        typer.echo(f"{drafter_out}: {config}")


@app.command()
def overhead(
    model: options.Model = None,
    drafter: options.DrafterPath = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", show_default=False)] = PROMPT,
    beam_width: options.BeamWidth = 4,
    beam_length: options.BeamLength = 5,
    tree_nodes: options.TreeNodes = None,
    temp: options.Temp = 0.0,
    rounds: Annotated[int, typer.Option(help="Triples of step, verify and draft.")] = 100,
    goal: Annotated[float, typer.Option(help="Largest share of a plain step.")] = 0.08,
    out: Out = None,
) -> None:
    """Measure what a step costs beyond draft and verify, as a share of a plain mlx-lm step.

    The exit code is 1 where the upper end of the 95% interval is above the goal.
    """
    check_int("rounds", rounds, 2)
    shape = TreeShape(beam_width, beam_length, tree_nodes)
    target, tokenizer, loaded = load_pair(model, drafter)
    from mlx_redrafter.bench.overhead import measure_overhead
    from mlx_redrafter.bench.results import checkpoint_name, new_result, write_result

    ids = list(tokenizer.encode(prompt))
    with progress("Triples") as on_progress:
        found = measure_overhead(target, loaded, ids, shape, rounds, temp, on_progress)
    plain = found.parts["stock step"].median
    table = Table("part", "ms", "95% interval", "of a plain step")
    for name, part in [
        *found.parts.items(),
        ("overhead", found.overhead),
        ("overhead, host work included", found.unhidden),
    ]:
        interval = f"{part.low * 1e3:.2f} to {part.high * 1e3:.2f}"
        table.add_row(name, f"{part.median * 1e3:.2f}", interval, f"{part.median / plain:.1%}")
    show(table)
    show(
        f"verify({shape.tree_nodes})/verify(1): "
        f"{found.parts['verify'].median / found.parts['verify(1)'].median:.2f}; "
        f"draft per level: {found.parts['draft'].median / shape.draft_length * 1e3:.2f} ms; "
        f"{found.tokens_per_step:.2f} tokens/step\n"
        f"overhead: {found.share.median:.1%} of a plain step, 95% interval "
        f"{found.share.low:.1%} to {found.share.high:.1%}; goal: at most {goal:.0%}"
    )
    if out is not None:
        configuration = {
            "model": checkpoint_name(str(model)),
            "drafter": checkpoint_name(str(drafter)),
            **vars(shape),
            "temp": temp,
            "rounds": rounds,
            "prompt_tokens": len(ids),
        }
        write_result(out, new_result("overhead", configuration, share=found.share, found=found))
    if found.share.high > goal:
        raise typer.Exit(1)


@app.command()
def memory(
    model: options.Model = None,
    drafter: options.DrafterPath = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 4096,
    beam_width: options.BeamWidth = 4,
    beam_length: options.BeamLength = 5,
    tree_nodes: options.TreeNodes = None,
    out: Out = None,
) -> None:
    """Measure memory against its bounds, with a random pair unless one is given.

    The exit code is 1 where a bound is broken.
    """
    check_int("prompt_tokens", prompt_tokens, 64)
    shape = TreeShape(beam_width, beam_length, tree_nodes)
    from mlx_redrafter.bench.memory import measure_memory, random_pair
    from mlx_redrafter.bench.results import checkpoint_name, new_result, write_result

    if model is None and drafter is None:
        target, loaded = random_pair()
    else:
        target, _, loaded = load_pair(model, drafter)
    with progress("Measurements") as on_progress:
        findings = measure_memory(target, loaded, shape, prompt_tokens, on_progress)
    table = Table("what", "found", "bound", "unit", "")
    for finding in findings:
        verdict = "ok" if finding.holds else "BROKEN"
        table.add_row(
            finding.name, f"{finding.found:.1f}", f"{finding.bound:.1f}", finding.unit, verdict
        )
    show(table)
    if out is not None:
        configuration = {
            "model": "random" if model is None else checkpoint_name(model),
            "drafter": "random" if drafter is None else checkpoint_name(drafter),
            **vars(shape),
            "prompt_tokens": prompt_tokens,
        }
        write_result(out, new_result("memory", configuration, findings=findings))
    if not all(finding.holds for finding in findings):
        raise typer.Exit(1)


def load_pair(model: str | None, drafter: str | None) -> tuple[Any, Any, Any]:
    """Load a target, its tokenizer and its drafter, all of which are needed."""
    if drafter is None:
        raise ConfigError("no drafter given; say --drafter FOLDER")
    return options.Loading(model, drafter, None, False, []).load()


def parse_count(text: str) -> int:
    """A number such as 200000, 150M or 0.2B."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMB]?)", text.strip(), re.IGNORECASE)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or number <= 0:
        raise ConfigError(f"expected a number such as 200000, 150M or 0.2B, got {text!r}")
    return int(number * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[match[2].upper()])


def show(*lines: object) -> None:
    """Print to stdout; wide enough for every table where stdout is no terminal."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for line in lines:
        console.print(line)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A callback that shows what is done of how much, and the time left, on stderr."""
    columns: Sequence[Any] = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(label)
        yield lambda done, total: bar.update(task, completed=done, total=total)
