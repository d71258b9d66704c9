"""``redrafter-mlx check``: comparison of drafted text with plain decoding."""

from __future__ import annotations

import json
import platform
import textwrap
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import mlx.core as mx
import typer

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.model_options import AdaptedPair
from mlx_redrafter.cli.progress import progress_bar
from mlx_redrafter.cli.prompt_options import PromptOptions
from mlx_redrafter.cli.text_options import (
    DraftOptions,
    IgnoreChatTemplate,
    MaxTokens,
    Seed,
    WholeTextOptions,
    generation_options,
    library_option,
)
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.version import __version__

if TYPE_CHECKING:
    from mlx_redrafter.kernels.trials import KernelTrial

PROMPTS = (
    "Once upon a time, there was a little girl who",
    "Explain in a few sentences why the sky is blue.",
    "def fibonacci(n):\n    ",
)
# Numbers of rows in the table of kernels (nodes for attention); `--json` prints all.
SHOWN = (2, 3, 4, 5, 6, 8, 9, 12, 16)


@dataclass(frozen=True)
class CheckedTextOptions(WholeTextOptions):
    """Options of a short text with a fixed seed, quantised from its first token on."""

    max_tokens: MaxTokens = 128
    seed: Seed = 0
    quantized_kv_start: Annotated[int, library_option("quantized_kv_start")] = 0


def check(
    pair: AdaptedPair,
    *,
    prompt: Annotated[
        list[str] | None,
        "Prompt to compare with; may be repeated. By default three of this program.",
        "-p",
    ] = None,
    text: CheckedTextOptions,
    drafting: DraftOptions,
    ignore_chat_template: IgnoreChatTemplate = False,
    kernels: Annotated[
        bool,
        "Instead of text, compare this package's GPU kernels with MLX's and time both, on "
        "the target's weights (Apple GPUs only).",
    ] = False,
    as_json: Annotated[bool, "Print one JSON object.", "--json"] = False,
) -> None:
    """Decode with drafts and without, and compare token by token.

    Without sampling, mlx-lm itself decodes the texts without drafts. The exit code is 1 if any
    text differs. A small gap between the two best tokens is a tie: kernels for one token and for
    several round differently in float16. With --kv-bits the same rounding may change a quantised
    value, so that gaps may be larger, in any dtype.
    """
    if kernels:
        _check_kernels(pair, as_json)
        return
    check_int("max_tokens", text.max_tokens, 1)
    options = generation_options(text, drafting)  # checked before anything is loaded
    target, tokenizer, drafter = pair.load()

    from mlx_redrafter.convert.block import try_readings
    from mlx_redrafter.engine.text_comparison import compare_decoding
    from mlx_redrafter.proposers.block.network import BlockNetwork
    from mlx_redrafter.target.target import Target

    reading = None
    if isinstance(drafter, BlockNetwork):
        reading = try_readings(drafter, Target(target), tokenizer).line
    if reading is not None and not as_json:
        typer.echo(reading)
    results = []
    for one in prompt or PROMPTS:
        given = PromptOptions(one, ignore_chat_template=ignore_chat_template)
        ids = given.encode(tokenizer, given.read())
        with progress_bar("Tokens") as bar:
            task = bar.add_task("tokens", total=2 * options.max_tokens)
            advance = partial(bar.advance, task)
            comparison = compare_decoding(
                target, tokenizer, drafter, ids, on_token=advance, **vars(options)
            )
        results.append({"prompt": one, **asdict(comparison)})
        if not as_json:
            typer.echo(_describe(results[-1], tokenizer))
    is_equal = all(result["difference"] is None for result in results)
    if as_json:
        found = {} if reading is None else {"reading": reading}
        typer.echo(json.dumps({"equal": is_equal, "prompts": results, **found}))
    if not is_equal:
        raise typer.Exit(1)


def _describe(result: dict[str, Any], tokenizer: Any) -> str:
    prompt = textwrap.shorten(result["prompt"], 40)
    difference = result["difference"]
    if difference is None:
        rate = result["tokens_per_step"]
        speed = "" if rate is None else f", {rate:.2f} tokens/step"
        return f"equal: {result['num_tokens']} tokens{speed} after {prompt!r}"
    expected, found = (
        "the end" if token is None else repr(tokenizer.decode([token]))
        for token in (difference["expected"], difference["found"])
    )
    return (
        f"different: token {difference['position']} of {result['num_tokens']} after {prompt!r} "
        f"is {found} instead of {expected}; the two best differ by {difference['gap']:.2g} nats"
    )


def _check_kernels(pair: AdaptedPair, as_json: bool) -> None:
    """Try this package's kernels on a model's weights, and print their equality and times.

    The exit code is 1 if a kernel differs from MLX's, or cannot be compiled or run.
    """
    from mlx_redrafter.kernels.layers import is_available
    from mlx_redrafter.kernels.trials import try_kernels

    if not is_available():
        raise ConfigError(
            f"--kernels needs an Apple GPU, found {mx.default_device()}; run it on a Mac"
        )
    trials = try_kernels(pair.load(kernels=False)[0])
    device = mx.device_info()
    machine = {
        "chip": f"{device.get('device_name')} ({device.get('architecture')})",
        "system": platform.version(),
        "mlx": version("mlx"),
        "mlx-redrafter": __version__,
    }
    if as_json:
        typer.echo(json.dumps({"machine": machine, "shapes": list(map(_to_json, trials))}))
    else:
        typer.echo(", ".join(f"{name} {value}" for name, value in machine.items()))
        typer.echo(
            "\n".join(map(_describe_trial, trials))
            or "this model has no matrix or attention of a shape that the kernels support"
        )
    if any(trial.failure for trial in trials):
        raise typer.Exit(1)


def _to_json(trial: KernelTrial[Any]) -> dict[str, Any]:
    return {
        "shape": vars(trial.shape),
        "num_layers": trial.num_layers,
        "outcome": trial.failure or trial.outcome,
        "times": {rows: vars(times) for rows, times in trial.times.items()},
        "rows": trial.rows,
        "failure": trial.failure,
    }


def _describe_trial(trial: KernelTrial[Any]) -> str:
    """Describe a shape in one line, and its times in a line per number of rows."""
    lines = [f"{trial.shape}; layers: {trial.num_layers}"]
    if trial.failure:
        return "\n".join([*lines, f"  failed: {trial.failure}"])
    lines.append(f"  {trial.outcome}")
    for rows in SHOWN:
        times = trial.times[rows]
        used = ", used" if rows in trial.rows else ""
        lines.append(
            f"  {rows:2} rows: {1e3 * times.kernel:.3f} ms, MLX's {1e3 * times.stock:.3f} ms{used}"
        )
    return "\n".join(lines)
