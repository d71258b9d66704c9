"""Texts that the target wrote: what came after each token, and the noise that it was chosen with.

Axes: n tokens of a shard, p roots, V vocabulary, L beam length.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.proposers.fit import ObservedSequence
from mlx_redrafter.training.posterior_noise import sample_posterior_noise
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.trees.tree import NO_TOKEN

# Token after the end of a text; no node of a tree has it, so no draft is accepted there.
END = NO_TOKEN - 1


def draw_noise(shard: Shard, states: NDArray[np.int64], vocab_size: int, temp: float) -> mx.array:
    """Draw noise for the choices after tokens, float32, shape (..., V) for indices of shape (...).

    The noise after a token is the same whenever it is drawn.
    """
    # Any noise will do past the end of the texts, where no draft is accepted.
    states = np.minimum(states, shard.tokens.shape[0] - 2)
    used, rows = np.unique(states, return_inverse=True)
    noise = sample_posterior_noise(shard, mx.array(used), vocab_size, temp)
    return noise[mx.array(rows.reshape(states.shape))]


def read_following(shard: Shard, roots: NDArray[np.int64], length: int) -> NDArray[np.int32]:
    """Read the L tokens after each root, END past the end of its text, int32, shape (p, L)."""
    starts = np.array(shard.starts)
    tokens = np.append(np.array(shard.tokens), np.int32(END))
    ends = starts[np.searchsorted(starts, roots, side="right")]
    ahead = roots[:, None] + np.arange(1, length + 1)
    return tokens[np.where(ahead < ends[:, None], ahead, -1)]


def find_generated(shard: Shard) -> list[tuple[int, NDArray[np.int64]]]:
    """Find texts with two generated tokens or more: start and indices of these tokens within."""
    is_trained, starts = np.array(shard.is_trained), np.array(shard.starts)
    texts = [(int(a), np.flatnonzero(is_trained[a:b])) for a, b in pairwise(starts)]
    return [(start, where) for start, where in texts if len(where) > 1 and where[0] > 0]


def iterate_generated_texts(shard: Shard) -> Iterator[ObservedSequence]:
    """Iterate over the generated part of each text, with the target's outputs."""
    for start, generated in find_generated(shard):
        first, last = start + int(generated[0]), start + int(generated[-1]) + 1
        states = slice(first - 1, last - 1)
        yield ObservedSequence(
            shard.tokens[first:last],
            shard.hidden[states],
            shard.top_ids[states],
            shard.top_log_probs[states],
        )
