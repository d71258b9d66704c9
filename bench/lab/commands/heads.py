"""Compare drafters of one target: tokens/step, cost of drafting, size, and speed.

The exit code is 1 if a text differs from the target's own.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.table import Table

from mlx_redrafter.bench.lab.heads import Head, Heads, compare_heads
from mlx_redrafter.bench.lab.heads_plot import plot_heads
from mlx_redrafter.bench.lab.options import (
    add_out,
    add_prompts,
    add_rounds,
    at_least,
    describe_rounds,
    make_settings,
    read_given_prompts,
)
from mlx_redrafter.bench.plots import count_texts, title
from mlx_redrafter.bench.prompts import describe_prompts
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import num_different
from mlx_redrafter.bench.result_file import checkpoint_name
from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.cli.bench_output import draw, parse_temps, progress, refuse_texts, show, warn
from mlx_redrafter.cli.model_options import Pair
from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.training.training_request import RUN_FILE
from mlx_redrafter.training_options import DataOptions, TrainingOptions


def add_options(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", help="folder or repository of the target; default: bundled")
    parser.add_argument(
        "--drafter", action="append", required=True, help="drafter to compare; repeatable"
    )
    add_prompts(parser)
    add_rounds(parser)
    parser.add_argument("--length", type=at_least(2), default=5, help="beam length of the chains")
    parser.add_argument("--temps", default="0,1", help="temperatures")
    parser.add_argument("--seed", type=int, default=0)
    add_out(parser, can_resume=True)


def run(arguments: Namespace) -> None:
    """Run the command."""
    temps = parse_temps(arguments.temps)
    target, tokenizer, heads = _load(arguments.model, arguments.drafter)
    encoded = read_given_prompts(arguments, tokenizer)
    configuration = {
        "model": checkpoint_name(arguments.model),
        "drafters": [head.name for head in heads],
        **describe_prompts(arguments.prompts, encoded),
        **describe_rounds(arguments),
        "length": arguments.length,
        "temps": list(temps),
        "seed": arguments.seed,
    }
    settings = make_settings(arguments, target, tokenizer, heads[0].drafter)
    recording = Recording(arguments.out, "heads", configuration, arguments.resume)
    with progress("Turns") as on_progress:
        found = compare_heads(
            settings, heads, encoded, temps, arguments.length, arguments.repeats, recording,
            arguments.cool_down, arguments.max_repeated, on_progress,
        )  # fmt: skip
    show(_table(found))
    if (out := arguments.out) is not None:
        heading = title(recording.result, target, count_texts(configuration))
        draw(lambda: [plot_heads(out.with_suffix(".png"), found, heading)])
    warn(recording.result["disturbances"])
    refuse_texts(num_different(one for row in found.rows for one in (row.chain, row.default)))


def _load(model: str | None, drafters: Sequence[str]) -> tuple[Any, Any, list[Head]]:
    """Load the target, its tokenizer and the drafters, each checked against the target."""
    names = [checkpoint_name(drafter) for drafter in drafters]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two drafters are called {name}; rename one of the folders")
    target, tokenizer, first = Pair(model, drafters[0]).load()
    # `load` returns each further drafter with a second copy of the target, which is dropped.
    others = (cast("Proposer", load(model, drafter)[2]) for drafter in drafters[1:])
    loaded = [first, *others]
    heads = [
        Head(name, drafter, *_training(Path(path)))
        for name, path, drafter in zip(names, drafters, loaded, strict=True)
    ]
    return target, tokenizer, heads


def _training(folder: Path) -> tuple[int | None, str]:
    """Read the token budget and the kind of the training run that wrote this folder."""
    try:
        values = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None, ""
    if not isinstance(values, dict):
        return None, ""
    tokens = values.get("tokens")
    return (tokens if type(tokens) is int and tokens > 0 else None), _kind(values)


def _kind(values: dict[str, Any]) -> str:
    """Name the head of a training run and the options that differ from their defaults."""
    if not isinstance(values.get("head"), str):
        return ""
    words = [values["head"]]
    if values.get("recipe", TrainingOptions.recipe) != TrainingOptions.recipe:
        words.append(str(values["recipe"]))
    if values.get("self_generated", DataOptions.self_generated) != DataOptions.self_generated:
        words.append(f"self-generated {values['self_generated']}")
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
