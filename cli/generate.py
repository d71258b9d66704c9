"""``redrafter-mlx generate``: text from a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import mlx_redrafter
from mlx_redrafter.checks import check_int, read_file
from mlx_redrafter.cli.live_text import ShowDrafts, live_text
from mlx_redrafter.cli.model_options import CONTEXT, WritingPair
from mlx_redrafter.cli.progress import is_talkative, prefill_progress
from mlx_redrafter.cli.prompt_options import PromptOptions
from mlx_redrafter.cli.text_options import DraftOptions, WholeTextOptions, generation_options
from mlx_redrafter.draft_plan import MAX_OUTCOMES
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation_options import GenerationOptions

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_redrafter.decoding.delivery import ShapeStats
    from mlx_redrafter.engine.responses import GenerationResponse
    from mlx_redrafter.grammar import Grammar
    from mlx_redrafter.proposers.speculate_ahead import Hits

# Largest file of a grammar, in bytes; `Grammar` accepts fewer characters than that.
MAX_GRAMMAR_BYTES = 1 << 20


@dataclass(frozen=True)
class GeneratingPair(WritingPair):
    """A pair that may draft ahead, and more tokens that end the text."""

    predraft: Annotated[
        int,
        "Draft on the CPU, while the target computes on the GPU, for this many likely results of "
        "its pass (speculative speculative decoding), 0 for none; for recurrent drafters and "
        "smaller models.",
    ] = 0
    extra_eos_token: Annotated[
        list[str] | None, "Also end the text at this token, given as text or id; may be repeated."
    ] = None

    def __post_init__(self) -> None:
        check_int("predraft", self.predraft, 0, MAX_OUTCOMES)
        if self.predraft and not self.drafts:
            raise ConfigError("--predraft needs a drafter, found --drafter none; leave one out")

    def load_writer(
        self, context: int = CONTEXT, kv_bits: int | None = None
    ) -> tuple[nn.Module, TokenizerWrapper, Any]:
        """Load the pair, and add the further stop tokens to the tokenizer."""
        model, tokenizer, drafter = super().load_writer(context, kv_bits)
        for token in self.extra_eos_token or ():
            _add_stop_token(tokenizer, token)
        if self.predraft and drafter is not None:
            drafter = mlx_redrafter.SpeculateAhead(drafter, self.predraft)
        return model, tokenizer, drafter


@dataclass(frozen=True)
class GrammarOptions:
    """The grammar of the text, in one of three forms."""

    json_schema: Annotated[
        Path | None, "File with a JSON schema: the text will be JSON that fits it."
    ] = None
    regex: Annotated[str | None, "Regular expression: the whole text will match it."] = None
    lark: Annotated[
        Path | None, "File with a grammar in Lark's notation: the text will follow it."
    ] = None

    def read(self) -> Grammar | None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{names} cannot be combined; give one")
        for name, value in given.items():
            is_file = isinstance(value, Path)
            text = read_file(value, "a grammar", max_bytes=MAX_GRAMMAR_BYTES) if is_file else value
            return getattr(mlx_redrafter.Grammar, name)(text)  # its class methods have these names
        return None


def generate(
    prompt: PromptOptions,
    pair: GeneratingPair,
    text: WholeTextOptions,
    grammar: GrammarOptions,
    drafting: DraftOptions,
    as_json: Annotated[bool, "Print one JSON object instead of the text.", "--json"] = False,
    stats: Annotated[
        bool | None,
        typer.Option(
            "--stats/--no-stats",
            help="Print statistics to stderr; by default on a terminal and with --verbose.",
            show_default=False,
        ),
    ] = None,
    show_drafts: ShowDrafts = False,
    verbose: Annotated[bool, "Also print the seed and a table of draft sizes."] = False,
) -> None:
    """Generate text: exactly what the model alone would write, in fewer forward passes."""
    options = generation_options(text, drafting)  # checked before anything is loaded
    rules = grammar.read()
    shape = vars(drafting) if options.plan is None else options.plan.options
    if verbose:
        given = "off"
        if pair.drafts and options.plan is None:
            given = "the fastest shape at every step"
        elif pair.drafts:
            given = ", ".join(f"{name}={value}" for name, value in shape.items())
        typer.echo(f"Seed: {options.seed}. Drafting: {given}", err=True)
    shown = nullcontext() if as_json else live_text(show_drafts)
    written, tokens, last, hits = _generate(pair, prompt, options, rules, shown)
    if as_json:
        settings = shape if pair.drafts else dict.fromkeys(shape)
        typer.echo(json.dumps(_to_json(written, tokens, last) | settings | {"seed": options.seed}))
    else:
        typer.echo()
        if stats or (stats is None and (verbose or is_talkative())):
            _print_statistics(last, hits, pair.drafts)
    if verbose and last.stats.shapes:
        _print_shapes(last.stats.shapes)


def _generate(
    pair: GeneratingPair,
    prompt: PromptOptions,
    options: GenerationOptions,
    grammar: Grammar | None,
    shown: AbstractContextManager[Callable[[GenerationResponse], None] | None],
) -> tuple[str, list[int], GenerationResponse, Hits | None]:
    """Return the text, its token ids, the last response, and the counts of drafting ahead."""
    context = CONTEXT + max(0, options.max_tokens)
    given = prompt.read()
    model, tokenizer, drafter = pair.load_writer(context, options.kv_bits)
    cache = prompt.load_cache(pair.model)
    ids = prompt.encode(tokenizer, given)
    text, tokens = "", []
    with shown as write, prefill_progress() as on_progress:
        for response in mlx_redrafter.stream_generate(
            model,
            tokenizer,
            ids,
            drafter=drafter,
            prompt_cache=cache,
            grammar=grammar,
            prompt_progress_callback=on_progress,
            **vars(options),
        ):
            text += response.text
            tokens.append(response.token)
            if write is not None:
                write(response)
    return text, tokens, response, getattr(drafter, "hits", None)


def _add_stop_token(tokenizer: TokenizerWrapper, token: str) -> None:
    # A tokenizer may return its unknown token for a name that it does not know.
    vocabulary = tokenizer.get_vocab()
    is_id = token.isdecimal() and int(token) in vocabulary.values()
    if not is_id and token not in vocabulary:
        raise ConfigError(f"--extra-eos-token must be a token of the model or an id, got {token!r}")
    tokenizer.add_eos_token(token)


def _to_json(text: str, tokens: list[int], last: GenerationResponse) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": tokens[:-1] if last.finish_reason == "stop" else tokens,
        "prompt_tokens": last.prompt_tokens,
        "generation_tokens": last.generation_tokens,
        "steps": last.steps,
        "tokens_per_step": last.tokens_per_step,
        "acceptance_rate_by_depth": last.stats.acceptance_rate_by_depth,
        "prompt_tps": last.prompt_tps,
        "generation_tps": last.generation_tps if last.generation_tokens > 1 else None,
        "peak_memory": last.peak_memory,
        "finish_reason": last.finish_reason,
    }


def _print_statistics(last: GenerationResponse, hits: Hits | None, drafts: bool) -> None:
    lines = [
        "=" * 10,
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec",
        # The first token belongs to the prompt's time.
        f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec"
        if last.generation_tokens > 1
        else "Generation: 1 token, in the time of the prompt",
        f"Peak memory: {last.peak_memory:.3f} GB",
    ]
    if drafts and last.tokens_per_step is not None:
        rates = [f"{rate:.0%}" for rate in last.stats.acceptance_rate_by_depth]
        lines.append(
            f"Speculative: {last.tokens_per_step:.2f} tokens/step over {last.steps} steps (plain "
            f"decoding: 1); acceptance rate by position: {', '.join(rates) or 'none'}"
        )
    if hits is not None:
        lines.append(f"Drafted ahead: {hits.foreseen} of {hits.passes} results were foreseen")
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
