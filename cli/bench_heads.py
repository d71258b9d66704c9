"""``redrafter-mlx bench heads``: drafters of any kinds beside each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.bench_options import Out, Prompts, Resume, ShortRounds
from mlx_redrafter.cli.bench_output import draw, parse_temps, progress, refuse_texts, show, warn
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.cli.text_options import MODEL, Seed
from mlx_redrafter.cli.train import RUN_FILE
from mlx_redrafter.cli.train_options import Schedule, Texts
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import SamplingParams

if TYPE_CHECKING:
    from mlx_redrafter.bench.heads import Head, Heads
    from mlx_redrafter.decoding.protocols import Proposer


def heads(
    prompts: Prompts,
    drafters: Annotated[
        list[str],
        typer.Option(
            "--drafter",
            help="Drafter of any kind made for the target, as for `generate`; say it once for each",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ],
    rounds: ShortRounds,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Target: a folder or a hub repository. The bundled one by default.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None,
    length: Annotated[int, typer.Option(help="Beam length of chains, root included.")] = 5,
    temps: Annotated[str, typer.Option(help="Temperatures.")] = "0,1",
    seed: Seed = 0,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Compare drafters of one target: tokens/step, cost of drafting, size, and speed.

    The exit code is 1 if a text is not the target's own.
    """
    check_int("length", length, 2)
    chosen = parse_temps(temps)
    for temp in chosen:
        SamplingParams(temp, seed=seed)
    from mlx_redrafter.bench.heads import compare_heads
    from mlx_redrafter.bench.heads_plot import plot_heads
    from mlx_redrafter.bench.plots import count_texts, title
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.report import num_different
    from mlx_redrafter.bench.result_file import checkpoint_name
    from mlx_redrafter.bench.runs import Setting

    target, tokenizer, loaded = _load(model, drafters)
    encoded = prompts.encode(tokenizer)
    configuration = {
        "model": checkpoint_name(model),
        "drafters": [head.name for head in loaded],
        **prompts.describe(encoded),
        **rounds.describe(),
        "length": length,
        "temps": list(chosen),
        "seed": seed,
    }
    setting = Setting(target, tokenizer, loaded[0].drafter, rounds.max_tokens, seed=seed)
    recording = Recording(out, "heads", configuration, resume)
    with progress("Turns") as on_progress:
        found = compare_heads(
            setting, loaded, encoded, chosen, length, rounds.repeats, recording, rounds.cool_down,
            rounds.max_repeated, on_progress,
        )  # fmt: skip
    show(_table(found))
    if out is not None:
        heading = title(recording.result, target, count_texts(configuration))
        draw(lambda: [plot_heads(out.with_suffix(".png"), found, heading)])
    warn(recording.result["disturbances"])
    refuse_texts(num_different(one for row in found.rows for one in (row.chain, row.default)))


def _load(model: str | None, drafters: Sequence[str]) -> tuple[Any, Any, list[Head]]:
    """The target, its tokenizer, and the drafters, checked to be its own."""
    from mlx_redrafter.bench.heads import Head
    from mlx_redrafter.bench.result_file import checkpoint_name

    names = [checkpoint_name(drafter) for drafter in drafters]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two drafters are called {name}; rename one of the folders")
    from mlx_redrafter.checkpoints.loading import load

    target, tokenizer, first = Pair(model, drafters[0]).load()
    # The others come with a target of their own each, which is not kept; none is None.
    others = (cast("Proposer", load(model, drafter)[2]) for drafter in drafters[1:])
    loaded = [first, *others]
    heads = [
        Head(name, drafter, *_training(Path(path)))
        for name, path, drafter in zip(names, drafters, loaded, strict=True)
    ]
    return target, tokenizer, heads


def _training(folder: Path) -> tuple[int | None, str]:
    """Most tokens of the texts of the run that wrote this folder, and words for its kind."""
    try:
        values = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None, ""
    if not isinstance(values, dict):
        return None, ""
    tokens = values.get("tokens")
    return (tokens if type(tokens) is int and tokens > 0 else None), _kind(values)


def _kind(values: dict[str, Any]) -> str:
    """The head of a run, and what is not as by default."""
    if not isinstance(values.get("head"), str):
        return ""
    words = [values["head"]]
    if values.get("fused"):
        words.append("fused")
    if values.get("layers_read") is not None:
        words.append(f"layers {values['layers_read']}")
    if values.get("recipe", Schedule.recipe) != Schedule.recipe:
        words.append(str(values["recipe"]))
    if values.get("self_written", Texts.self_written) != Texts.self_written:
        words.append(f"self-written {values['self_written']}")
    if values.get("start_from") is not None:
        words.append("continued")
    return ", ".join(words)


def _table(found: Heads) -> Table:
    columns = (
        "drafter", "trained on", "MB", "ms/search", "ms/level", "drafting a chain", "temperature",
        "chain: tokens/step", "speed", "default: tokens/step", "speed", "interval", "different",
    )  # fmt: skip
    title = "speed: by mlx-lm; drafting a chain: by the time of a plain step"
    table = Table(*columns, title=title, title_justify="left")
    costs = {cost.name: cost for cost in found.costs}
    for row in found.rows:
        cost, (chain, default) = costs[row.name], (row.chain, row.default)
        table.add_row(
            row.name,
            "" if cost.trained_tokens is None else f"{cost.trained_tokens:,}",
            f"{cost.bytes / 1e6:.1f}",
            f"{1e3 * cost.first:.2f}",
            f"{1e3 * cost.level:.2f}",
            f"{cost.drafting:.2f}",
            f"{row.temp:g}",
            f"{chain.tokens_per_step or 1:.2f}",
            f"{chain.speedup.median:.2f}" if chain.speedup else "",
            f"{default.tokens_per_step or 1:.2f}",
            f"{default.speedup.median:.2f}" if default.speedup else "",
            default.speedup.span() if default.speedup else "",
            str((chain.num_different or 0) + (default.num_different or 0)),
        )
    return table
