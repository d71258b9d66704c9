"""Text generation with mlx-lm's interface, several tokens per forward pass of the target."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse as StockResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.config import (
    Auto,
    SamplingParams,
    Selection,
    TreeShape,
    check_int,
    check_max_tokens,
    find_shape,
)
from mlx_redrafter.decoding.processors import LogitsProcessor, ProcessorChain
from mlx_redrafter.decoding.sampling import KeyedChooser, Sampler, StockChooser, TokenChooser
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.decoding.text import Decoder, Request, Token
from mlx_redrafter.errors import CheckpointError, ConfigError
from mlx_redrafter.host import to_ints
from mlx_redrafter.policy.adaptive import SHORTEST, AdaptivePolicy, DraftPolicy, FixedPolicy
from mlx_redrafter.policy.profiling import step_costs
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import ProgressCallback, Target

logger = logging.getLogger(__name__)


@dataclass
class GenerationResponse(StockResponse):
    """One token of the text and the text it adds: mlx-lm's response with counts of drafting.

    Attributes:
        steps: Verifies so far; the first token belongs to none.
        tokens_per_step: Tokens per verify so far, None before the first.
        stats: All counts of the request, which go on counting.
    """

    steps: int = 0
    tokens_per_step: float | None = None
    stats: DecodingStats = field(default_factory=DecodingStats)


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    **options: Any,
) -> str:
    """Generate a complete text; the options are those of `stream_generate`.

    Example:
        >>> model, tokenizer, drafter = load("org/model", drafter="org/drafter")  # doctest: +SKIP
        >>> generate(model, tokenizer, "Once", drafter=drafter)  # doctest: +SKIP
    """
    return "".join(
        response.text for response in stream_generate(model, tokenizer, prompt, **options)
    )


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    drafter: Drafter | None = None,
    max_tokens: int = 256,
    temp: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    beam_width: int | Auto = "auto",
    beam_length: int | Auto = "auto",
    tree_nodes: int | Auto = "auto",
    select: Selection = "top_n",
    couple: bool = True,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: Sequence[Any] | None = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: ProgressCallback | None = None,
) -> Iterator[GenerationResponse]:
    """Yield the target's own text token by token; the drafter only makes it faster.

    Args:
        model: A model loaded by `load` or by mlx-lm.
        tokenizer: Its tokenizer.
        prompt: Text, or token ids.
        drafter: A drafter made for this model; None for plain decoding by the same code.
        max_tokens: Most tokens to generate, -1 for no limit.
        temp: Temperature; 0, the default, takes the most probable token.
        top_p: Nucleus mass, off by default.
        top_k: Number of most probable tokens kept, off by default.
        min_p: Least probability relative to the most probable token, off by default.
        seed: 0 to 2**32 - 1, fresh by default. The text is a function of the prompt, these
            sampling options and the seed: the drafter and its options do not change it.
        beam_width: Beams kept at every level of drafting, 1 to 64. With "auto" for this and the
            next two, and ``select="top_n"``, two beams are drafted, as far as levels give more
            than their time, or nothing where plain decoding is faster; and every step verifies
            those drafts whose probabilities are worth the time that they take. Step times are
            measured once per model and machine, which takes a few seconds, and once more when a
            text begins with a long context; they are corrected while generating. What drafts were
            worth a text takes over from the one before with the same drafter. If one is a number
            the others are 4, 5 and 9.
        beam_length: Tokens per beam, root included, 2 to 16.
        tree_nodes: Tokens per verify, root included.
        select: "top_n" verifies the most probable drafts, "beam" the merged beams.
        couple: At a temperature, rank drafts with the noise that the target will choose with; False
            is there to measure what that is worth.
        sampler: A sampler in mlx-lm's form instead of ``temp`` to ``seed``: the tokens are those
            of ``mlx_lm.generate_step`` with the same ``mx.random.seed``. It must depend on its
            argument and on ``mx.random.state`` only.
        logits_processors: In mlx-lm's form, functions of the tokens so far and the logits.
        prompt_cache: From mlx-lm's ``make_prompt_cache``; holds the prompt and the tokens yielded
            once the iterator has ended or was closed.
        prefill_step_size: Most prompt tokens per forward pass.
        prompt_progress_callback: Called with the prompt tokens processed and their number.

    Raises:
        ConfigError: An option is out of range (a ValueError), the prompt is empty or too long.
        CheckpointError: The drafter was made for another model.
        UnsupportedTargetError: Trees of this model or cache would not be exact.
        NonFiniteError: The logits after the prompt are NaN.
    """
    sampling = {"temp": temp, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    shape = find_shape(beam_width, beam_length, tree_nodes, select)
    check_max_tokens(max_tokens)
    check_int("prefill_step_size", prefill_step_size, 1)
    if sampler is not None and given:
        raise ConfigError(f"sampler= replaces {', '.join(given)}; give one or the other")
    params = SamplingParams(**{"seed": secrets.randbits(32), **given})

    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    ids = encode_prompt(tokenizer, prompt)
    target = Target(model)
    cache = target.new_cache(prompt_cache)
    _check_prompt(ids, cache.length, target)
    if drafter is not None:
        check_fit(drafter, target, tokenizer.vocab_size)
        # Of the trees that "auto" drafts, the shortest has the fewest nodes to choose from.
        _check_shape(shape or SHORTEST, drafter)
    chooser: TokenChooser = (
        StockChooser(sampler) if sampler is not None else KeyedChooser(params, target.vocab_size)
    )
    processors = ProcessorChain(logits_processors, ids) if logits_processors else None
    request = Request(
        prompt=ids,
        stop_tokens=frozenset(tokenizer.eos_token_ids),
        max_tokens=max_tokens,
        prefill_step_size=prefill_step_size,
        on_progress=prompt_progress_callback or (lambda done, total: None),
        leave_as_stock=prompt_cache is not None or sampler is not None,
    )
    controller = _controller(target, drafter, shape, couple, cache.length + len(ids))
    decoder = Decoder(target, cache, chooser, drafter, controller, processors, couple)
    return _respond(decoder, request, tokenizer)


def encode_prompt(tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Token ids of a prompt; text gets the special tokens it does not start with, as in mlx-lm."""
    if isinstance(prompt, str):
        starts_special = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        return list(tokenizer.encode(prompt, add_special_tokens=not starts_special))
    return to_ints(prompt) if isinstance(prompt, mx.array) else [int(token) for token in prompt]


def check_fit(drafter: Drafter, target: Target, tokenizer_size: int) -> None:
    """Raise `CheckpointError` unless ``drafter`` can draft for ``target``.

    A vocabulary smaller than the target's embedding is accepted if it covers the tokenizer: the
    rows beyond are padding.
    """
    config = drafter.config
    if config.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the drafter's hidden_size {config.hidden_size} does not match the target's "
            f"{target.hidden_size}; use a drafter trained for this model"
        )
    least = min(tokenizer_size, target.vocab_size)
    if not least <= config.vocab_size <= target.vocab_size:
        raise CheckpointError(
            f"the drafter's vocab_size {config.vocab_size} does not match the target's "
            f"{target.vocab_size}; use a drafter trained for this model"
        )


def _controller(
    target: Target, drafter: Drafter | None, shape: TreeShape | None, couple: bool, length: int
) -> DraftPolicy:
    if drafter is None:
        return FixedPolicy(None)
    if shape is not None:
        return FixedPolicy(shape)
    # What uncoupled drafts are worth is not what coupled ones are.
    return AdaptivePolicy(
        step_costs(target, drafter, length), drafter.carried_over if couple else None
    )


def _check_shape(shape: TreeShape, drafter: Drafter) -> None:
    rows = drafter.config.head_rows
    if shape.beam_width > rows:
        raise ConfigError(
            f"beam_width must be at most the {rows} tokens that the drafter proposes, got "
            f"{shape.beam_width}"
        )
    most = 1 + shape.draft_length * min(shape.level_nodes, rows)
    if shape.tree_nodes is not None and shape.tree_nodes > most:
        raise ConfigError(
            f"tree_nodes must be at most {most} with the {rows} tokens that the drafter proposes, "
            f"got {shape.tree_nodes}"
        )


def _check_prompt(prompt: list[int], num_cached: int, target: Target) -> None:
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one token")
    if min(prompt) < 0 or max(prompt) >= target.vocab_size:
        raise ConfigError(
            f"prompt token ids must be from 0 to {target.vocab_size - 1}, got "
            f"{min(prompt) if min(prompt) < 0 else max(prompt)}"
        )
    total, limit = num_cached + len(prompt), target.context_length
    if limit is not None and total > limit:
        cached = f" after {num_cached} cached ones" if num_cached else ""
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens{cached}, the model's context is {limit}; "
            "shorten the prompt"
        )


def _respond(
    decoder: Decoder, request: Request, tokenizer: TokenizerWrapper
) -> Iterator[GenerationResponse]:
    detokenizer = tokenizer.detokenizer
    limit = decoder.target.context_length
    start = time.perf_counter()
    prompt_tps = 0.0
    with (
        wired_limit(decoder.target.model, [generation_stream]),  # type: ignore[list-item]
        _concluding(decoder),
        closing(decoder.decode(request)) as tokens,  # type: ignore[type-var]
    ):
        num_before = decoder.cache.length + len(request.prompt)
        for n, token in enumerate(tokens, start=1):
            if n == 1:
                now = time.perf_counter()
                prompt_tps, start = len(request.prompt) / (now - start), now
            if limit is not None and num_before + n == limit + 1:
                logger.warning(
                    "the text is now longer than the model's context of %d tokens; "
                    "what follows may be poor",
                    limit,
                )
            if token.finish_reason != "stop":
                detokenizer.add_token(token.id)
            if token.finish_reason is not None:
                detokenizer.finalize()
            yield _response(
                decoder.stats,
                token,
                detokenizer.last_segment,
                len(request.prompt),
                prompt_tps,
                n / (time.perf_counter() - start),
                n,
            )


@contextmanager
def _concluding(decoder: Decoder) -> Iterator[None]:
    """However a text ends, keep what its steps have shown."""
    try:
        yield
    finally:
        if isinstance(decoder.controller, AdaptivePolicy):
            decoder.stats.choices = decoder.controller.choices()
            if decoder.drafter is not None and decoder.couples:
                decoder.drafter.carried_over = (
                    decoder.controller.carried_over or decoder.drafter.carried_over
                )


def _response(
    stats: DecodingStats,
    token: Token,
    text: str,
    prompt_tokens: int,
    prompt_tps: float,
    generation_tps: float,
    generation_tokens: int,
) -> GenerationResponse:
    return GenerationResponse(
        text=text,
        token=token.id,
        logprobs=token.log_probs,
        from_draft=token.is_draft,
        prompt_tokens=prompt_tokens,
        prompt_tps=prompt_tps,
        generation_tokens=generation_tokens,
        generation_tps=generation_tps,
        peak_memory=mx.get_peak_memory() / 1e9,
        finish_reason=token.finish_reason,
        steps=stats.steps,
        tokens_per_step=stats.tokens_per_step,
        stats=stats,
    )
