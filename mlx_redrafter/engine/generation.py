"""Text generation with mlx-lm's interface: `Engine` as functions."""

import weakref
from collections.abc import Sequence
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.delivery import ProgressCallback
from mlx_redrafter.decoding.processors import LogitsProcessor
from mlx_redrafter.decoding.sampling import Sampler
from mlx_redrafter.engine.engine import AnyDrafter, Engine
from mlx_redrafter.engine.learned_state import LearnedState
from mlx_redrafter.engine.responses import ResponseStream
from mlx_redrafter.generation_options import OptionKeywords
from mlx_redrafter.grammar import Grammar
from mlx_redrafter.proposers.lookup import Contexts


class GenerationKeywords(OptionKeywords, total=False):
    """Keyword arguments of `Engine.stream`, for type checkers."""

    sampler: Sampler | None
    logits_processors: Sequence[LogitsProcessor] | None
    grammar: Grammar | None
    prompt_cache: Sequence[Any] | None
    prompt_progress_callback: ProgressCallback | None
    history: Sequence[Sequence[int]] | Contexts


class LearnedStates:
    """Learned states of models and their drafters, each for as long as both live."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], LearnedState]] = {}

    def of(self, *owners: object) -> LearnedState:
        """Return the learned state of these objects, known by their identity."""
        key = tuple(map(id, owners))
        if key not in self._known:
            try:
                refs = [weakref.ref(one, lambda _: self._known.pop(key, None)) for one in owners]
            except TypeError:  # a number, say, for which `Engine` raises
                return LearnedState()
            self._known[key] = refs, LearnedState()
        return self._known[key][1]


# A function has no object of its own that could keep the learned state from text to text.
_memories = LearnedStates()


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    drafter: AnyDrafter = "lookup",
    **options: Unpack[GenerationKeywords],
) -> str:
    """Generate a complete text; the arguments are those of `stream_generate`."""
    return _engine(model, tokenizer, drafter).generate(prompt, **options)


def generate_batch(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int] | mx.array],
    *,
    drafter: AnyDrafter = "lookup",
    batch_size: int = 8,
    grammar: Grammar | None = None,
    **options: Unpack[OptionKeywords],
) -> list[str]:
    """Generate several texts at once, which costs less time than one after the other.

    Every text is the one that `generate` makes of its prompt with these options. The texts share
    their forward passes: the model's weights are read once for all of them. The arguments and the
    errors are those of `stream_generate` and `Engine.stream_batch`; a `ConfigError` is raised
    before any text begins.
    """
    engine = _engine(model, tokenizer, drafter)
    stream = engine.stream_batch(prompts, batch_size=batch_size, grammar=grammar, **options)
    texts = ["" for _ in prompts]
    for number, response in stream:
        texts[number] += response.text
    return texts


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    drafter: AnyDrafter = "lookup",
    **options: Unpack[GenerationKeywords],
) -> ResponseStream:
    """Yield the target's own text token by token; the drafter only makes it faster.

    With "auto", every step drafts as far ahead, and verifies as many drafts, as is expected to be
    fastest, from prompt lookup or the drafter, or decodes plainly. Step times are measured once per
    model and machine, which costs a few seconds, and once more when a text begins with a long
    context. The estimates for drafts go from one text to the next.

    Args:
        model: A model loaded by `load` or by mlx-lm.
        tokenizer: The model's tokenizer.
        prompt: Text, or token ids.
        drafter: A drafter from `load`, or "lookup" for prompt lookup; None for plain decoding by
            the same code.
        **options: Fields of `GenerationOptions`, such as ``max_tokens``, ``temp`` and ``seed``, and
            the further arguments of `Engine.stream`, such as ``prompt_cache`` and ``grammar``.

    Raises:
        ConfigError: An option is out of range (a ValueError), the prompt is empty or too long.
        CheckpointError: The drafter was made for another model.
        UnsupportedTargetError: Trees of this model or cache would not be exact.
        NonFiniteError: The logits after the prompt are NaN, or nothing may follow the text.
    """
    return _engine(model, tokenizer, drafter).stream(prompt, **options)


def _engine(model: nn.Module, tokenizer: Any, drafter: AnyDrafter) -> Engine:
    owners = [model] if drafter is None or isinstance(drafter, str) else [model, drafter]
    return Engine(model, tokenizer, drafter, _memories.of(*owners))
