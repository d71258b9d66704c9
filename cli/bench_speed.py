"""``redrafter-mlx bench compare`` and ``sweep``: speed against stock mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mlx_redrafter.cli import options
from mlx_redrafter.cli.bench_output import (
    BeamLength,
    BeamWidth,
    TreeNodes,
    draw,
    load_pair,
    parse_ints,
    parse_names,
    progress,
    refuse_texts,
    show,
)
from mlx_redrafter.config import TreeShape, check_int
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_redrafter.bench.report import Row
    from mlx_redrafter.bench.runs import EncodedPrompt
    from mlx_redrafter.bench.timing import Estimate

Prompts = Annotated[
    Path,
    typer.Option(
        "--prompts",
        help="MT-bench, Spec-Bench or plain .jsonl, or text with empty lines between prompts.",
        show_default=False,
    ),
]
NumPrompts = Annotated[
    int | None, typer.Option(help="Take so many, from all categories in turn; all by default.")
]
MaxPromptTokens = Annotated[
    int | None, typer.Option(help="Cut prompts to their first tokens.", show_default=False)
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-m", help="Most tokens per text.")]
Repeats = Annotated[int, typer.Option(help="Rounds per prompt.")]
CoolDown = Annotated[float, typer.Option(help="Seconds to rest before every run.")]
MaxRepeated = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Count only texts with at most this share of repeated 4-grams."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where the file ends.")]


def compare(
    prompts: Prompts,
    model: options.Model = None,
    drafter: options.DrafterPath = None,
    stock_draft_model: Annotated[
        str | None, typer.Option(help="Small model for mlx-lm's own speculative decoding.")
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option(help="Of it.")] = 3,
    num_prompts: NumPrompts = None,
    max_prompt_tokens: MaxPromptTokens = None,
    max_tokens: MaxTokens = 128,
    repeats: Repeats = 3,
    temp: options.Temp = 0.0,
    seed: options.Seed = 0,
    beam_width: BeamWidth = 4,
    beam_length: BeamLength = 5,
    tree_nodes: TreeNodes = None,
    ignore_chat_template: options.IgnoreChatTemplate = False,
    cool_down: CoolDown = 0.0,
    max_repeated: MaxRepeated = 1.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file.")] = None,
    resume: Resume = False,
) -> None:
    """Compare stock mlx-lm, plain decoding, beams, best nodes and auto on the same prompts.

    The exit code is 1 where a text is not the target's own.
    """
    _check_counts(max_tokens=max_tokens, repeats=repeats, num_draft_tokens=num_draft_tokens)
    shapes = [
        TreeShape(beam_width, beam_length, select="beam"),
        TreeShape(beam_width, beam_length, tree_nodes),
    ]
    target, tokenizer, loaded = load_pair(model, drafter)
    from mlx_redrafter.bench.compare import arm_name
    from mlx_redrafter.bench.compare import compare as measure
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.result_file import checkpoint_name, pair_names
    from mlx_redrafter.bench.runs import Setting

    small = None
    if stock_draft_model is not None:
        small = options.Loading(stock_draft_model, None, None, False, [], drafts=False).load()[0]
    encoded = _encode(tokenizer, prompts, num_prompts, not ignore_chat_template, max_prompt_tokens)
    configuration = {
        **pair_names(model, drafter, loaded),
        "stock_draft_model": stock_draft_model and checkpoint_name(stock_draft_model),
        "num_draft_tokens": num_draft_tokens,
        **_describe_prompts(prompts, encoded),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temp": temp,
        "seed": seed,
        "shapes": {arm_name(shape): vars(shape) for shape in shapes},
        "cool_down": cool_down,
    }
    setting = Setting(target, tokenizer, loaded, max_tokens, temp, options.fresh_seed(seed))
    recording = Recording(out, "compare", configuration, resume)
    with progress("Turns") as on_progress:
        found = measure(
            setting, shapes, encoded, repeats, recording, small, num_draft_tokens, cool_down,
            max_repeated, on_progress,
        )  # fmt: skip
    show(_table(found.rows, "all prompts"))
    calibration = recording.result.get("calibration_seconds", 0.0)
    show(f"auto: timing the shapes took {calibration:.1f} s, which no answer's time includes")
    for category, rows in found.by_category.items():
        show(_table(rows, category))
    refuse_texts(_num_different(found.rows))


def sweep(
    prompts: Prompts,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for JSON, CSV and PNG.")],
    model: options.Model = None,
    drafter: options.DrafterPath = None,
    widths: Annotated[str, typer.Option(help="Beam widths, such as 1-4,8.")] = "1-4",
    lengths: Annotated[str, typer.Option(help="Beam lengths.")] = "2-5",
    nodes: Annotated[
        str | None, typer.Option(help="Tree nodes with top_n.", show_default="the default")
    ] = None,
    selections: Annotated[str, typer.Option(help="top_n, beam or both.")] = "top_n,beam",
    dtypes: Annotated[
        str | None, typer.Option(help="float32, float16, bfloat16.", show_default="the model's")
    ] = None,
    temps: Annotated[str, typer.Option(help="Temperatures.")] = "0",
    couple: Annotated[
        bool, typer.Option(help="Rank drafts with the noise of the target, above temperature 0.")
    ] = True,
    num_prompts: NumPrompts = None,
    max_prompt_tokens: MaxPromptTokens = None,
    max_tokens: MaxTokens = 64,
    repeats: Repeats = 2,
    seed: options.Seed = 0,
    shapes_per_block: Annotated[int, typer.Option(help="Shapes per run of stock mlx-lm.")] = 4,
    ignore_chat_template: options.IgnoreChatTemplate = False,
    cool_down: CoolDown = 0.0,
    max_repeated: MaxRepeated = 1.0,
    resume: Resume = False,
) -> None:
    """Sweep beam width and length against stock mlx-lm: JSON, Apple's CSV tables, plots.

    The exit code is 1 where a text is not the target's own.
    """
    _check_counts(max_tokens=max_tokens, repeats=repeats, shapes_per_block=shapes_per_block)
    from mlx_redrafter.bench.plots import plot_sweep
    from mlx_redrafter.bench.recording import Recording
    from mlx_redrafter.bench.result_file import pair_names
    from mlx_redrafter.bench.runs import Setting
    from mlx_redrafter.bench.sweep import DTYPES, Grid, write_tables
    from mlx_redrafter.bench.sweep import sweep as measure

    grid = Grid(
        parse_ints(widths),
        parse_ints(lengths),
        (None,) if nodes is None else parse_ints(nodes),
        parse_names(selections, ("top_n", "beam")),  # type: ignore[arg-type]
        (None,) if dtypes is None else parse_names(dtypes, tuple(DTYPES)),
        _parse_temps(temps),
    )
    target, tokenizer, loaded = load_pair(model, drafter)
    encoded = _encode(tokenizer, prompts, num_prompts, not ignore_chat_template, max_prompt_tokens)
    configuration = {
        **pair_names(model, drafter, loaded),
        **_describe_prompts(prompts, encoded),
        "grid": {name: list(values) for name, values in asdict(grid).items()},
        "max_tokens": max_tokens,
        "repeats": repeats,
        "seed": seed,
        "couple": couple,
        "shapes_per_block": shapes_per_block,
        "cool_down": cool_down,
    }
    setting = Setting(
        target, tokenizer, loaded, max_tokens, seed=options.fresh_seed(seed), couple=couple
    )
    recording = Recording(out / "sweep.json", "sweep", configuration, resume)
    with progress("Turns") as on_progress:
        points = measure(
            setting, grid, encoded, repeats, recording, shapes_per_block, cool_down, max_repeated,
            on_progress,
        )  # fmt: skip
    write_tables(out, recording.runs, points, max_tokens)
    title = f"{configuration['model']} on {recording.result['machine']['processor']}"
    for group in dict.fromkeys((point.dtype, point.temp) for point in points):
        rows = [point.row for point in points if (point.dtype, point.temp) == group]
        show(_table(rows, f"{group[0]}, temperature {group[1]:g}"))
    draw(lambda: plot_sweep(out, points, title))
    refuse_texts(_num_different([point.row for point in points]))


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        check_int(name, count, 1)


def _parse_temps(text: str) -> tuple[float, ...]:
    try:
        temps = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"expected temperatures such as 0,0.7,1, got {text!r}") from None
    if min(temps) < 0:
        raise ConfigError(f"temperatures must be 0 or more, got {text!r}")
    return temps


def _encode(
    tokenizer: Any, path: Path, count: int | None, use_template: bool, max_tokens: int | None
) -> list[EncodedPrompt]:
    from mlx_redrafter.bench.prompts import choose, encode, read_prompts
    from mlx_redrafter.bench.runs import EncodedPrompt

    return [
        EncodedPrompt(
            prompt.name, prompt.category, encode(tokenizer, prompt, use_template, max_tokens)
        )
        for prompt in choose(read_prompts(path), count)
    ]


def _describe_prompts(path: Path, prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
    return {
        "prompt_file": path.name,
        "prompts": [[prompt.name, prompt.category, len(prompt.ids)] for prompt in prompts],
    }


def _table(rows: Sequence[Row], title: str) -> Table:
    columns = (
        "way", "speedup", "95% interval", "tokens/s", "tokens/step", "nodes/step",
        "accepted by depth", "repeated 4-grams", "prompt speedup", "texts", "different",
    )  # fmt: skip
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        speedup = row.speedup
        table.add_row(
            row.arm,
            _format(speedup),
            "" if speedup is None else f"{speedup.low:.2f} to {speedup.high:.2f}",
            _format(row.tokens_per_second, 1),
            "" if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}",
            "" if row.nodes_per_step is None else f"{row.nodes_per_step:.1f}",
            " ".join(f"{rate:.0%}" for rate in row.acceptance_rate_by_depth),
            f"{row.repeated:.0%}",
            _format(row.prompt_speedup),
            str(row.num_texts),
            "" if row.num_different is None else str(row.num_different),
        )
    return table


def _format(value: Estimate | None, digits: int = 2) -> str:
    return "" if value is None else f"{value.median:.{digits}f}"


def _num_different(rows: Sequence[Row]) -> int:
    return sum(row.num_different or 0 for row in rows)
