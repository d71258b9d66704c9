"""Texts of the target, many at once: plain decoding of a batch with mlx-lm's caches.

The passes that generate texts also give what a drafter learns from, so nothing reads them again.

mlx-lm's own generator sorts the vocabulary or normalises it for every token, and copies the cache
whenever a text ends.

Axes: B texts, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.teacher_outputs import TeacherOutputs, chunk_tokens

# Share of the texts in the caches that have ended before these are copied without them.
ENDED_SHARE = 0.125

OnTokens = Callable[[int], None]


def report_after(before: int, on_tokens: OnTokens, count: int) -> None:
    on_tokens(before + count)


def answer(
    target: Target,
    prompts: Sequence[list[int]],
    temps: Sequence[float],
    most: Sequence[int],
    stop_tokens: Sequence[int],
    on_tokens: OnTokens,
    kept: TeacherOutputs | None = None,
) -> list[list[int]]:
    """Generate an answer to each prompt, greedily or at its temperature.

    An answer has at most ``most`` tokens, at least 1, its stop token included. ``on_tokens``
    receives the number of tokens generated so far. ``kept`` receives the outputs at all tokens but
    the last ones, which no pass reads. Uses MLX's global random state.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    caches = _read_prompts(target, [prompt[:-1] for prompt in prompts], lambda: on_tokens(0), kept)
    tokens = mx.array([prompt[-1] for prompt in prompts])
    rows = list(range(len(prompts)))
    is_open = set(rows)
    while is_open:
        outputs = target.compute(tokens[:, None], caches, kept.layers if kept else ())
        tokens = sample(outputs.logits[:, -1], [temps[i] for i in rows])
        if kept is not None:
            begins = np.array([len(prompts[i]) + len(answers[i]) - 1 for i in rows])
            kept.write(rows, begins, np.array([int(i in is_open) for i in rows]), outputs)
        for i, token in zip(rows, to_ints(tokens), strict=True):
            if i in is_open:
                answers[i].append(token)
                if token in stop_tokens or len(answers[i]) == most[i]:
                    is_open.remove(i)
        if is_open and len(rows) - len(is_open) > ENDED_SHARE * len(rows):
            left = [row for row, i in enumerate(rows) if i in is_open]
            where, rows = mx.array(left), [rows[row] for row in left]
            tokens = tokens[where]
            for cache in caches:
                cache.filter(where)
        on_tokens(sum(map(len, answers)))
    return answers


def can_batch(model: nn.Module) -> bool:
    """Return whether mlx-lm can decode several texts of a model at once."""
    return all(hasattr(layer, "merge") for layer in make_prompt_cache(model))


def sample(logits: mx.array, temps: Sequence[float]) -> mx.array:
    """Choose a token by each row of logits (B, V), at its own temperature; 0 is greedy."""
    chosen = mx.argmax(logits, axis=-1)
    sampled = [row for row, temp in enumerate(temps) if temp > 0]
    if sampled:
        where = mx.array(sampled)
        scale = mx.array([1 / temps[row] for row in sampled])[:, None]
        drawn = mx.random.categorical(logits[where].astype(mx.float32) * scale)
        chosen[where] = drawn.astype(chosen.dtype)
    return chosen


def _read_prompts(
    target: Target,
    prompts: Sequence[list[int]],
    on_pass: Callable[[], None],
    kept: TeacherOutputs | None,
) -> list[Any]:
    """Read prompts one by one, then join their caches.

    mlx-lm loses the states of some models (mamba2) if padded prompts take several passes.
    """
    single = []
    size = chunk_tokens(target.vocab_size, 1)
    for number, prompt in enumerate(prompts):
        single.append(make_prompt_cache(target.model))
        for begin in range(0, len(prompt), size):
            chunk = prompt[begin : begin + size]
            outputs = target.compute(mx.array([chunk]), single[-1], kept.layers if kept else ())
            if kept is not None:
                kept.write([number], np.array([begin]), np.array([len(chunk)]), outputs)
            mx.eval([cache.state for cache in single[-1]])
            on_pass()
    if not can_batch(target.model):
        (alone,) = single
        return alone
    return [layer[0].merge(list(layer)) for layer in zip(*single, strict=True)]
