"""``redrafter-mlx check``: equality of drafted text and the target's own."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer

from mlx_redrafter.checks import check_int
from mlx_redrafter.cli.check_kernels import check_available, check_kernels
from mlx_redrafter.cli.model_options import AdaptedPair
from mlx_redrafter.cli.prompting import Prompting
from mlx_redrafter.cli.result_records import takes_records
from mlx_redrafter.cli.text_options import (
    PROMPT,
    Debug,
    Drafting,
    IgnoreChatTemplate,
    MaxTokens,
    QuantizedKvStart,
    Seed,
    TextOptions,
    generation_options,
)

PROMPTS = (
    "Once upon a time, there was a little girl who",
    "Explain in a few sentences why the sky is blue.",
    "def fibonacci(n):\n    ",
)


@dataclass(frozen=True)
class CheckedText(TextOptions):
    """A shorter text, the same one every time, in which what may be quantised is."""

    max_tokens: MaxTokens = 128
    seed: Seed = 0
    quantized_kv_start: QuantizedKvStart = 0


@takes_records
def check(
    pair: AdaptedPair,
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            help="Prompt to compare; may be repeated. Three by default.",
            show_default=False,
            rich_help_panel=PROMPT,
        ),
    ] = None,
    text: CheckedText,
    drafting: Drafting,
    ignore_chat_template: IgnoreChatTemplate = False,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Compare and time this package's kernels for Apple GPUs instead, on the target's "
            "weights and in the shape of its attention.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Decode with and without the drafter, and compare token by token.

    The exit code is 1 if any text differs. Small gaps between the two best tokens are ties that
    float16 kernels for one and for several tokens may break differently. With --kv-bits the same
    rounding may change a code, which counts for more: gaps may be larger, in any dtype.
    """
    if kernels:
        check_available()
        check_kernels(pair.load(kernels=False)[0], as_json)
        return
    check_int("max_tokens", text.max_tokens, 1)
    options = generation_options(text, drafting)  # checked before anything is loaded
    target, tokenizer, drafter = pair.load()

    from mlx_redrafter.cli.progress import progress_bar
    from mlx_redrafter.engine.text_comparison import compare_decoding

    results = []
    for one in prompt or PROMPTS:
        ids = Prompting(one, ignore_chat_template).encode(tokenizer)
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
        typer.echo(json.dumps({"equal": is_equal, "prompts": results}))
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
