"""Text generation with mlx-lm's interface: `Engine` with a function's face."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.processors import LogitsProcessor
from mlx_redrafter.decoding.records import ProgressCallback
from mlx_redrafter.decoding.sampling import Sampler
from mlx_redrafter.draft_plan import Auto, Selection
from mlx_redrafter.engine.engine import AnyDrafter, Engine
from mlx_redrafter.engine.learned_state import LearnedState
from mlx_redrafter.engine.responses import ResponseStream
from mlx_redrafter.grammar import Grammar


class LearnedStates:
    """Memories of models and their drafters, each for as long as both live."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], LearnedState]] = {}

    def of(self, *owners: object) -> LearnedState:
        """The memory of these objects, which are told apart by identity."""
        key = tuple(map(id, owners))
        if key not in self._known:
            try:
                refs = [weakref.ref(one, lambda _: self._known.pop(key, None)) for one in owners]
            except TypeError:  # a number, say, which `Engine` refuses
                return LearnedState()
            self._known[key] = refs, LearnedState()
        return self._known[key][1]


# A function has no place of its own for what outlives a text.
_memories = LearnedStates()


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


def generate_batch(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int] | mx.array],
    *,
    drafter: AnyDrafter = None,
    batch_size: int = 8,
    **options: Any,
) -> list[str]:
    """Generate several texts at once, which takes less time than one after the other.

    Every text is the one that `generate` makes of its prompt with these options. They share their
    forward passes: the model's weights are read once for all of them.

    Args:
        model: A model loaded by `load` or by mlx-lm.
        tokenizer: The model's tokenizer.
        prompts: Texts, or token ids.
        drafter: As in `stream_generate`; a lookup drafts only where ``beam_width``,
            ``beam_length`` and ``tree_nodes`` are given.
        batch_size: Most texts at once.
        **options: Fields of `GenerationOptions`; the seed is every text's.

    Raises:
        ConfigError: As `stream_generate`, before any text begins.
        CheckpointError: The drafter was made for another model.
        UnsupportedTargetError: The model has layers that do not attend to all tokens.
        NonFiniteError: The logits after one of the prompts or texts are NaN.
    """
    texts = ["" for _ in prompts]
    engine = _engine(model, tokenizer, drafter)
    for number, response in engine.stream_batch(prompts, batch_size=batch_size, **options):
        texts[number] += response.text
    return texts


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    drafter: AnyDrafter = None,
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
    grammar: Grammar | None = None,
    prompt_cache: Sequence[Any] | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: ProgressCallback | None = None,
) -> ResponseStream:
    """Yield the target's own text token by token; the drafter only makes it faster.

    With "auto" every step drafts as far ahead, and verifies as many drafts, as is worth the time,
    drafts out of the text itself among them, or decodes plainly. Step times are measured once per
    model and machine, which takes a few seconds, and once more when a text begins with a long
    context. What drafts were worth, a text takes over from the one before.

    Args:
        model: A model loaded by `load` or by mlx-lm.
        tokenizer: The model's tokenizer.
        prompt: Text, or token ids.
        drafter: A drafter from `load`, "lookup" for drafts out of the text itself; None for plain
            decoding by the same code.
        max_tokens: As in `GenerationOptions`, like all up to ``couple``.
        temp: As in `GenerationOptions`.
        top_p: As in `GenerationOptions`.
        top_k: As in `GenerationOptions`.
        min_p: As in `GenerationOptions`.
        seed: As in `GenerationOptions`.
        beam_width: As in `GenerationOptions`.
        beam_length: As in `GenerationOptions`.
        tree_nodes: As in `GenerationOptions`.
        select: As in `GenerationOptions`.
        couple: As in `GenerationOptions`.
        sampler: A sampler in mlx-lm's form instead of ``temp`` to ``seed``: the tokens are those
            of ``mlx_lm.generate_step`` with the same ``mx.random.seed``. It must depend on its
            argument and on ``mx.random.state`` only.
        logits_processors: Functions of the tokens so far and the logits, in mlx-lm's form.
        grammar: Grammar of the text; every token is one that it allows, after the
            logits processors. Where ``max_tokens`` cuts it, the text may be incomplete.
        prompt_cache: A cache from mlx-lm's ``make_prompt_cache``, the target's layers and then,
            as in mlx-lm, those of a draft model, an EAGLE head or an MTP module; it holds the
            prompt and the tokens yielded once the iterator has ended or was closed.
        prefill_step_size: As in `GenerationOptions`.
        kv_bits: As in `GenerationOptions`; a ``prompt_cache`` is a list whose layers are replaced
            by quantised ones, as in mlx-lm.
        kv_group_size: As in `GenerationOptions`.
        quantized_kv_start: As in `GenerationOptions`.
        prompt_progress_callback: Callback for the prompt tokens processed and their number.

    Raises:
        ConfigError: An option is out of range (a ValueError), the prompt is empty or too long.
        CheckpointError: The drafter was made for another model.
        UnsupportedTargetError: Trees of this model or cache would not be exact.
        NonFiniteError: The logits after the prompt are NaN, or nothing may follow the text.
    """
    return _engine(model, tokenizer, drafter).stream(
        prompt,
        max_tokens=max_tokens,
        temp=temp,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        beam_width=beam_width,
        beam_length=beam_length,
        tree_nodes=tree_nodes,
        select=select,
        couple=couple,
        prefill_step_size=prefill_step_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
        sampler=sampler,
        logits_processors=logits_processors,
        grammar=grammar,
        prompt_cache=prompt_cache,
        prompt_progress_callback=prompt_progress_callback,
    )


def _engine(model: nn.Module, tokenizer: Any, drafter: AnyDrafter) -> Engine:
    owners = [model] if drafter is None or isinstance(drafter, str) else [model, drafter]
    return Engine(model, tokenizer, drafter, _memories.of(*owners))
