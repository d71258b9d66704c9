"""``redrafter-mlx generate``: text from a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mlx_redrafter.cli import options
from mlx_redrafter.config import SamplingParams, check_max_tokens
from mlx_redrafter.errors import ConfigError

if TYPE_CHECKING:
    from mlx_redrafter.decoding.stats import ShapeStats
    from mlx_redrafter.generation import GenerationResponse


def generate(
    prompt: options.Prompt,
    model: options.Model = None,
    drafter: options.DrafterPath = None,
    no_draft: Annotated[
        bool,
        typer.Option(
            "--no-draft", help="Plain decoding by the same code.", rich_help_panel=options.MODEL
        ),
    ] = False,
    adapter_path: options.AdapterPath = None,
    trust_remote_code: options.TrustRemoteCode = False,
    extra_eos_token: options.ExtraEosToken = None,
    max_tokens: options.MaxTokens = 256,
    temp: options.Temp = 0.0,
    top_p: options.TopP = 0.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    beam_width: options.BeamWidth = "auto",
    beam_length: options.BeamLength = "auto",
    tree_nodes: options.TreeNodes = "auto",
    select: options.Select = "top_n",
    ignore_chat_template: options.IgnoreChatTemplate = False,
    chat_template_config: options.ChatTemplateConfig = None,
    system_prompt: options.SystemPrompt = None,
    prompt_cache_file: Annotated[
        str | None,
        typer.Option(
            "--prompt-cache-file",
            help="Continue from a cache written by mlx_lm.cache_prompt.",
            rich_help_panel=options.PROMPT,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also say the seed, what is drafted and why.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Generate text: exactly what the target alone would write, in fewer forward passes."""
    if model is not None and drafter is None and not no_draft:
        raise ConfigError(
            "no drafter given: say --drafter FOLDER, make one with `redrafter-mlx train`, or "
            "decode without one with --no-draft"
        )
    # Cheap checks come before anything is loaded.
    check_max_tokens(max_tokens)
    drafting = options.Drafting(beam_width, beam_length, tree_nodes, select)
    shape = drafting.shape()
    params = SamplingParams(temp, top_p, top_k, min_p, options.fresh_seed(seed))
    prompting = options.Prompting(prompt, ignore_chat_template, chat_template_config, system_prompt)
    prompting.template_options()
    loading = options.Loading(
        model, drafter, adapter_path, trust_remote_code, extra_eos_token or [], not no_draft
    )
    request: dict[str, Any] = {
        "max_tokens": max_tokens,
        **vars(params),
        **vars(drafting),
    }
    if verbose:
        chosen = "off" if no_draft else shape or "the fastest shape at every step"
        typer.echo(f"Seed: {params.seed}. Drafting: {chosen}", err=True)
    result = _generate(loading, prompting, prompt_cache_file, request, stream=not as_json)
    if as_json:
        settings = (
            dict.fromkeys(vars(drafting)) if no_draft else vars(drafting) | vars(shape or drafting)
        )
        typer.echo(json.dumps({**_to_json(result), **settings, "seed": params.seed}))
    else:
        typer.echo()
        _print_statistics(result.last, drafts=not no_draft)
    if verbose and result.last.stats.choices:
        _print_choices(result.last.stats.choices)


class Result(NamedTuple):
    """A finished text: its parts, its token ids with the stop token, and the last response."""

    text: str
    tokens: list[int]
    last: GenerationResponse


def _generate(
    loading: options.Loading,
    prompting: options.Prompting,
    prompt_cache_file: str | None,
    request: dict[str, Any],
    stream: bool,
) -> Result:
    from mlx_redrafter.cli.progress import prefill_progress
    from mlx_redrafter.generation import stream_generate

    model, tokenizer, drafter = loading.load()
    cache = None if prompt_cache_file is None else _load_cache(prompt_cache_file, loading.model)
    ids = prompting.encode(tokenizer, follows_cache=cache is not None)
    text, tokens = "", []
    with prefill_progress() as on_progress:
        for response in stream_generate(
            model,
            tokenizer,
            ids,
            drafter=drafter,
            prompt_cache=cache,
            prompt_progress_callback=on_progress,
            **request,
        ):
            text += response.text
            tokens.append(response.token)
            if stream:
                sys.stdout.write(response.text)
                sys.stdout.flush()
    return Result(text, tokens, response)


def _load_cache(path: str, model: str | None) -> list[Any]:
    from mlx_lm.models.cache import load_prompt_cache

    try:
        cache, metadata = load_prompt_cache(path, return_metadata=True)
    except (RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--prompt-cache-file {path} is no cache of mlx_lm.cache_prompt: {error}"
        ) from error
    if metadata.get("model") != model:
        raise ConfigError(
            f"--prompt-cache-file was made with model {metadata.get('model')!r}, but --model is "
            f"{model!r}; give the same one"
        )
    return list(cache)


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


def _print_statistics(last: GenerationResponse, drafts: bool) -> None:
    lines = [
        "=" * 10,
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {last.peak_memory:.3f} GB",
    ]
    if drafts and last.tokens_per_step is not None:
        rates = ", ".join(f"{rate:.0%}" for rate in last.stats.acceptance_rate_by_depth) or "none"
        lines.append(
            f"Speculative: {last.tokens_per_step:.2f} tokens/step over {last.steps} steps, "
            f"accepted by depth: {rates}"
        )
    typer.echo("\n".join(lines), err=True)


def _print_choices(choices: Sequence[ShapeStats]) -> None:
    """What was drafted and verified, what a step of it takes, and what steps gave."""
    lines = ["Drafted         steps  ms/step  tokens/step"]
    for choice in choices:
        shape = choice.shape
        name = shape and f"{shape.beam_width} x {shape.beam_length}, {shape.tree_nodes} nodes"
        gave = f"{choice.tokens / choice.steps:.2f}" if choice.steps else "-"
        lines.append(
            f"{name or 'nothing':<15}{choice.steps:>6}{1e3 * choice.seconds:>9.2f}{gave:>13}"
        )
    typer.echo("\n".join(lines), err=True)
