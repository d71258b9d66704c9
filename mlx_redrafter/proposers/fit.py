"""Calibration: two scalars that make a drafter's probabilities the chances of acceptance.

A tree has the drafts with the largest products of probabilities, so probabilities that are too
sharp make it too narrow, and flat ones too broad. Greedy decoding chooses the most probable token
for certain, while a drafter is trained on the target's distributions, so most score scales are
above 1. With sampling, a share of the target's noise ranks drafts: a large one if the drafter knows
the distribution well, while the noise would outweigh the knowledge of a poor one.

Axes: n tokens of a sequence, k most probable tokens, p predictions, V rows of the head, H hidden
size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.device_read import to_floats, to_ints
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.stored_config import COUPLING_WEIGHT, INVERSE_TEMPERATURE

# Inverse temperatures to try: eight per octave, from a quarter to 8.
SCALES = tuple(2.0 ** (eighths / 8) for eighths in range(-16, 25))
# Weights of the noise to try, from a fifth to all of it.
WEIGHTS = tuple(twentieths / 20 for twentieths in range(4, 21))
# Temperature of the target's samples. The best weight hardly changes with it.
TEMP = 0.8
# Number of most probable tokens of the target to sample from. For the bundled second drafter the
# best weight seemed to be 0.85 with 32 of the 4,096 tokens; with 512 it was 0.95, as with all.
TOP_TOKENS = 512
# Predictions to fit the scalars to; further ones hardly change them.
ENOUGH = 8192
# Predictions to compute at once, which bounds memory.
BATCH = 128


class ReadSequence(NamedTuple):
    """A prompt and n tokens that the target generated after it.

    Attributes:
        tokens: Token ids of both, integer, shape (m,).
        num_prompt: Number of tokens of the prompt.
        states: States of the target that a network reads, at all tokens except the last, shape
            (m - 1, H); that of a token predicted the next one.
        top_ids: The target's most probable tokens at each generated token, integer, shape (n, k).
        top_log_probs: Their natural log-probabilities, shape (n, k).
    """

    tokens: mx.array
    num_prompt: int
    states: mx.array
    top_ids: mx.array
    top_log_probs: mx.array


class Prediction(NamedTuple):
    """Drafts of one depth, each after drafts that were right.

    The drafter's logits have shape (p, V), the rest is as in `ReadSequence`, shape (p, k).
    """

    logits: mx.array
    top_ids: mx.array
    top_log_probs: mx.array

    @property
    def chosen(self) -> mx.array:
        """The target's greedy choices, integer, shape (p,)."""
        return self.top_ids[:, 0]


def fit_depths(
    drafter: DraftNetwork, predictions: Iterable[Iterable[Prediction]]
) -> tuple[Any, tuple[float, ...]]:
    """Return a drafter's config with fitted scalars, and an inverse temperature for each depth.

    ``inverse_temperature`` is the factor on its logits that makes the target's greedy tokens
    likeliest. ``coupling_weight`` is the weight of the noise with which its first rank equals the
    target's sample at `TEMP` in the largest number of places.

    A part has the predictions of the depths in their order. Parts after `ENOUGH` predictions stay
    unread. Waits for the device.
    """
    scale, weight = INVERSE_TEMPERATURE, COUPLING_WEIGHT
    scales: list[float] = []
    by_depth: list[NDArray[np.float64]] = []
    matches, count = np.zeros(len(WEIGHTS), int), 0
    for part in predictions:
        for depth, prediction in enumerate(part):
            if depth == len(by_depth):
                by_depth.append(np.zeros(len(SCALES)))
            by_depth[depth] += _nats(drafter, prediction)
            matches += _matches(drafter, prediction, mx.random.key(count))
            count += prediction.logits.shape[0]
        if count >= ENOUGH:
            break
    if count > 0:
        scale, *scales = (SCALES[np.argmin(nats)] for nats in (sum(by_depth), *by_depth))
        weight = WEIGHTS[np.argmax(matches)]
    config = replace(drafter.config, inverse_temperature=scale, coupling_weight=weight)
    return config, tuple(scales)


def parts(text: ReadSequence, least: int = 3) -> Iterator[ReadSequence]:
    """Split the generated tokens into parts of `BATCH`, without those of fewer than ``least``."""
    tokens, first, states, *tops = text
    for start in range(0, tops[0].shape[0], BATCH):
        ids, log_probs = (array[start : start + BATCH] for array in tops)
        before, stop = first - 1 + start, first - 1 + start + ids.shape[0]
        if ids.shape[0] >= least:
            yield ReadSequence(tokens[before : stop + 1], 1, states[before:stop], ids, log_probs)


def _nats(drafter: DraftNetwork, prediction: Prediction) -> list[float]:
    """Sum the nats of the choices under each of `SCALES`; 0 for tokens that the head lacks."""
    logits = prediction.logits.astype(mx.float32)
    is_row = drafter.to_token_ids(mx.arange(logits.shape[-1])) == prediction.chosen[:, None]
    row = mx.argmax(is_row, axis=-1, keepdims=True)
    right = mx.take_along_axis(logits, row, axis=-1)[:, 0]
    known = mx.any(is_row, axis=-1)
    nats = [
        mx.sum(known * (mx.logsumexp(scale * logits, axis=-1) - scale * right)) for scale in SCALES
    ]
    return to_floats(mx.stack(nats))


def _matches(drafter: DraftNetwork, prediction: Prediction, key: mx.array) -> list[int]:
    """Count the first ranks that equal the target's sample, under each of `WEIGHTS`."""
    noise = mx.random.gumbel((prediction.logits.shape[0], drafter.config.vocab_size), key=key)
    top_noise = mx.take_along_axis(noise, prediction.top_ids, axis=-1)
    best = mx.argmax(prediction.top_log_probs / TEMP + top_noise, axis=-1, keepdims=True)
    sampled = mx.take_along_axis(prediction.top_ids, best, axis=-1)[:, 0]
    logits = prediction.logits.astype(mx.float32) / TEMP
    own_noise = noise[:, drafter.to_token_ids(mx.arange(logits.shape[-1]))]
    matches = [
        mx.sum(drafter.to_token_ids(mx.argmax(logits + weight * own_noise, axis=-1)) == sampled)
        for weight in WEIGHTS
    ]
    return to_ints(mx.stack(matches))
