"""``redrafter-mlx check``: does drafting leave the text of this model alone?"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import Annotated, Any

import typer

from mlx_redrafter.cli import options
from mlx_redrafter.config import SamplingParams, check_int
from mlx_redrafter.errors import ConfigError

PROMPTS = (
    "Once upon a time, there was a little girl who",
    "Explain in a few sentences why the sky is blue.",
    "def fibonacci(n):\n    ",
)


def check(
    model: options.Model = None,
    drafter: options.DrafterPath = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            help="Prompt to compare; may be repeated. Three by default.",
            show_default=False,
            rich_help_panel=options.PROMPT,
        ),
    ] = None,
    adapter_path: options.AdapterPath = None,
    trust_remote_code: options.TrustRemoteCode = False,
    max_tokens: options.MaxTokens = 128,
    temp: options.Temp = 0.0,
    top_p: options.TopP = 0.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = 0,
    beam_width: options.BeamWidth = "auto",
    beam_length: options.BeamLength = "auto",
    tree_nodes: options.TreeNodes = "auto",
    select: options.Select = "top_n",
    ignore_chat_template: options.IgnoreChatTemplate = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: options.Debug = False,
) -> None:
    """Decode with and without the drafter, and compare token by token.

    The exit code is 1 if any text differs. Small gaps between the two best tokens are ties that
    float16 kernels for one and for several tokens may break differently.
    """
    if model is not None and drafter is None:
        raise ConfigError("no drafter given; say --drafter FOLDER")
    check_int("max_tokens", max_tokens, 1)
    drafting = options.Drafting(beam_width, beam_length, tree_nodes, select)
    drafting.shape()  # refuses what is impossible before anything is loaded
    params = SamplingParams(temp, top_p, top_k, min_p, options.fresh_seed(seed))
    loading = options.Loading(model, drafter, adapter_path, trust_remote_code, [])
    target, tokenizer, loaded = loading.load()
    assert loaded is not None

    from mlx_redrafter.parity import compare_decoding

    results = []
    for text in prompt or PROMPTS:
        prompting = options.Prompting(text, ignore_chat_template, None, None)
        comparison = compare_decoding(
            target,
            tokenizer,
            loaded,
            prompting.encode(tokenizer),
            max_tokens,
            **vars(params),
            **vars(drafting),
        )
        results.append({"prompt": text, **asdict(comparison)})
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
