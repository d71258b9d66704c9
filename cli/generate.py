"""``redrafter-mlx generate``: text from a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mlx_redrafter.cli.grammar_options import Held
from mlx_redrafter.cli.model_options import WritingPair
from mlx_redrafter.cli.prompting import Prompting
from mlx_redrafter.cli.result_records import takes_records
from mlx_redrafter.cli.text_options import Debug, Drafting, TextOptions, generation_options

if TYPE_CHECKING:
    from mlx_redrafter.decoding.stats import ShapeStats
    from mlx_redrafter.engine.responses import GenerationResponse
    from mlx_redrafter.generation_options import GenerationOptions
    from mlx_redrafter.grammar import Grammar
    from mlx_redrafter.proposers.speculate_ahead import Hits


@dataclass(frozen=True)
class Output:
    """What is printed, and how."""

    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Also print the seed, and steps by their drafts."),
    ] = False
    debug: Debug = False


@takes_records
def generate(
    prompting: Prompting,
    pair: WritingPair,
    text: TextOptions,
    held: Held,
    drafting: Drafting,
    output: Output,
) -> None:
    """Generate text: exactly what the target alone would write, in fewer forward passes."""
    options = generation_options(text, drafting)  # checked before anything is loaded
    grammar = held.read()
    plan = options.plan
    if output.verbose:
        given = "the fastest shape at every step"
        if plan is not None:
            given = ", ".join(f"{name}={value}" for name, value in plan.options.items())
        typer.echo(f"Seed: {options.seed}. Drafting: {'off' if pair.no_draft else given}", err=True)
    result = _generate(pair, prompting, options, grammar, stream=not output.as_json)
    if output.as_json:
        shape = vars(drafting) if plan is None else plan.options
        settings = dict.fromkeys(shape) if pair.no_draft else shape
        typer.echo(json.dumps({**_to_json(result), **settings, "seed": options.seed}))
    else:
        typer.echo()
        _print_statistics(result, drafts=not pair.no_draft)
    if output.verbose and result.last.stats.shapes:
        _print_shapes(result.last.stats.shapes)


class Result(NamedTuple):
    """A finished text.

    Attributes:
        text: The text.
        tokens: Token ids, the stop token's included.
        last: Last response.
        hits: Counts of drafts made ahead; None where none were.
    """

    text: str
    tokens: list[int]
    last: GenerationResponse
    hits: Hits | None


def _generate(
    pair: WritingPair,
    prompting: Prompting,
    options: GenerationOptions,
    grammar: Grammar | None,
    stream: bool,
) -> Result:
    from mlx_redrafter.cli.progress import prefill_progress
    from mlx_redrafter.engine.generation import stream_generate

    model, tokenizer, drafter = pair.load()
    cache = prompting.load_cache(pair.model)
    ids = prompting.encode(tokenizer)
    text, tokens = "", []
    with prefill_progress() as on_progress:
        for response in stream_generate(
            model,
            tokenizer,
            ids,
            drafter=None if pair.no_draft else drafter,
            prompt_cache=cache,
            grammar=grammar,
            prompt_progress_callback=on_progress,
            **vars(options),
        ):
            text += response.text
            tokens.append(response.token)
            if stream:
                sys.stdout.write(response.text)
                sys.stdout.flush()
    return Result(text, tokens, response, getattr(drafter, "hits", None))


def _to_json(result: Result) -> dict[str, Any]:
    last = result.last
    stopped = last.finish_reason == "stop"
    return {
        "text": result.text,
        "tokens": result.tokens[:-1] if stopped else result.tokens,
        "prompt_tokens": last.prompt_tokens,
        "generation_tokens": last.generation_tokens,
        "steps": last.steps,
        "tokens_per_step": last.tokens_per_step,
        "acceptance_rate_by_depth": last.stats.acceptance_rate_by_depth,
        "prompt_tps": last.prompt_tps,
        "generation_tps": last.generation_tps,
        "peak_memory": last.peak_memory,
        "finish_reason": last.finish_reason,
    }


def _print_statistics(result: Result, drafts: bool) -> None:
    last, hits = result.last, result.hits
    lines = [
        "=" * 10,
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {last.peak_memory:.3f} GB",
    ]
    if drafts and last.tokens_per_step is not None:
        rates = [f"{rate:.0%}" for rate in last.stats.acceptance_rate_by_depth]
        lines.append(
            f"Speculative: {last.tokens_per_step:.2f} tokens/step over {last.steps} steps (plain "
            f"decoding: 1); at least 1, 2, ... drafts kept in {', '.join(rates) or 'none'}"
        )
    if hits is not None:
        lines.append(f"Predrafted: {hits.foreseen} of {hits.passes} outcomes were drafted for")
    typer.echo("\n".join(lines), err=True)


def _print_shapes(shapes: Sequence[ShapeStats]) -> None:
    """Print the steps of every kind: their number, and what was measured and expected."""
    lines = ["Drafted             steps  ms/step  expected  tokens/step  expected"]
    for one in shapes:
        name, plan = "nothing", one.plan
        if plan is not None:
            search = f"{plan.shape.width} x {plan.shape.length}"
            name = f"{'lookup' if plan.from_text else search}, {plan.num_nodes} nodes"
        steps = max(1, one.steps)
        lines.append(
            f"{name:<20}{one.steps:>5}{1e3 * one.seconds:>9.2f}{1e3 * one.expected_seconds:>10.2f}"
            f"{one.tokens / steps:>13.2f}{one.expected_tokens / steps:>10.2f}"
        )
    typer.echo("\n".join(lines), err=True)
