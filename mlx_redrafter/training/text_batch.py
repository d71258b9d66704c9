"""Texts of the target, many at once: plain decoding of a batch with mlx-lm's caches.

mlx-lm's own generator sorts the vocabulary or normalises it for every token, and copies the cache
whenever a text ends.

Axes: B texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.device_read import to_ints

# Maximum number of tokens of a pass over prompts, so that an interruption waits for a short one.
PROMPT_TOKENS = 512
# Share of the texts in the caches that have ended before these are copied without them.
ENDED_SHARE = 0.125

OnTokens = Callable[[int], None]


def answer(
    model: nn.Module,
    prompts: Sequence[list[int]],
    temps: Sequence[float],
    most: Sequence[int],
    stop_tokens: Sequence[int],
    on_tokens: OnTokens,
) -> list[list[int]]:
    """Generate an answer to each prompt, greedily or at its temperature.

    An answer has at most ``most`` tokens, at least 1, its stop token included. ``on_tokens``
    receives the number of tokens generated so far. Uses MLX's global random state.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    caches = _read_prompts(model, [prompt[:-1] for prompt in prompts], lambda: on_tokens(0))
    tokens = mx.array([prompt[-1] for prompt in prompts])
    rows = list(range(len(prompts)))
    is_open = set(rows)
    while is_open:
        logits = model(tokens[:, None], cache=caches)[:, -1]
        tokens = sample(logits, [temps[i] for i in rows])
        for i, token in zip(rows, to_ints(tokens), strict=True):
            if i in is_open:
                answers[i].append(token)
                if token in stop_tokens or len(answers[i]) == most[i]:
                    is_open.remove(i)
        if is_open and len(rows) - len(is_open) > ENDED_SHARE * len(rows):
            kept = [row for row, i in enumerate(rows) if i in is_open]
            where, rows = mx.array(kept), [rows[row] for row in kept]
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
        chosen[where] = mx.random.categorical(logits[where].astype(mx.float32) * scale).astype(
            chosen.dtype
        )
    return chosen


def _read_prompts(
    model: nn.Module, prompts: Sequence[list[int]], on_pass: Callable[[], None]
) -> list[Any]:
    """Read prompts, padded on the right, into caches for all of them."""
    if len(prompts) == 1 and not can_batch(model):
        caches = make_prompt_cache(model)
    else:
        single = [make_prompt_cache(model) for _ in prompts]
        caches = [layer[0].merge(list(layer)) for layer in zip(*single, strict=True)]
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    padded = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    if any(padding):
        for cache in caches:
            cache.prepare(lengths=lengths, right_padding=padding)
    chunk = max(1, PROMPT_TOKENS // len(prompts))
    for begin in range(0, longest, chunk):
        model(mx.array(padded[:, begin : begin + chunk]), cache=caches)
        mx.eval([cache.state for cache in caches])
        on_pass()
    if any(padding):
        for cache in caches:
            cache.finalize()
    return caches
