"""Tokens per step that decoding would need for texts that the target wrote; the target is not run.

A target that wrote x_1 .. x_n chooses, wherever decoding stands in this text, the next token of it.
So drafting from the cached hidden states, by the functions that decoding uses, and comparing with
the text is what decoding does. Texts that were sampled are drafted with noise that the target may
have sampled them with, as decoding with a seed does.

Axes: n tokens of a shard, p positions, N nodes, L beam length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.config import SamplingParams, TreeShape
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.proposers.redrafter.beam import expand
from mlx_redrafter.proposers.redrafter.calibration import Text
from mlx_redrafter.proposers.redrafter.network import Drafter, Embed
from mlx_redrafter.training.posterior_noise import noise_of_choices
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.tree import NO_TOKEN, best_nodes

# Positions that are drafted for at once, and the bytes of their float32 logits.
MAX_POSITIONS = 512
LOGITS_BYTES = 2**26
# A text with more of the most probable tokens than this was written greedily.
GREEDY_SHARE = 0.97
# No node of a tree has this token, so nothing is accepted past the end of a text.
END = NO_TOKEN - 1


def simulate(
    drafter: Drafter, embed: Embed, shards: Sequence[Shard], shape: TreeShape, temp: float = 0.0
) -> DecodingStats:
    """Count the steps of decoding all texts; waits for the device.

    Args:
        drafter: The network.
        embed: The target's input embedding.
        shards: Texts, each a prompt and what the target wrote after it (``is_trained``).
        shape: What is drafted; ``select`` is "top_n".
        temp: Temperature of those texts that are not greedy. 0 drafts them without noise, as
            decoding by a sampler of mlx-lm's does.

    Returns:
        Counts over all texts, as if they were one: as ever, the first token of a text belongs to no
        step, but only one such token is counted, so that ``tokens_per_step`` is right.
    """
    total = DecodingStats(num_tokens=1)
    for shard in shards:
        accepted = np.zeros(shard.tokens.shape[0], np.int64)
        stretches: dict[float, list[NDArray[np.int64]]] = {0.0: [], temp: []}
        for start, written in _written(shard):
            stretch = np.arange(start + written[0], start + written[-1])
            stretches[0.0 if _is_greedy(shard, start + written) else temp].append(stretch)
        for noise_temp, roots in stretches.items():
            if roots:
                places = np.concatenate(roots)
                counts = count_accepted(drafter, embed, shard, places, shape, noise_temp)
                accepted[places] = counts
            for stretch in roots:
                _walk(accepted, int(stretch[0]), int(stretch[-1]) + 1, shape, total)
    return total


def _written(shard: Shard) -> list[tuple[int, NDArray[np.int64]]]:
    """Of each text with two tokens by the target or more: its start, and where they are in it."""
    is_trained, starts = np.array(shard.is_trained), np.array(shard.starts)
    texts = [(int(a), np.flatnonzero(is_trained[a:b])) for a, b in pairwise(starts)]
    return [(start, where) for start, where in texts if len(where) > 1 and where[0] > 0]


def _is_greedy(shard: Shard, written: NDArray[np.int64]) -> bool:
    """Whether the target wrote these tokens greedily; in lower precision a few may be others."""
    best = np.array(shard.top_ids[:, 0])[written - 1]
    return bool(np.mean(best == np.array(shard.tokens)[written]) > GREEDY_SHARE)


def written_texts(shard: Shard) -> Iterator[Text]:
    """What the target wrote of each text, with what it found probable along the way."""
    for start, written in _written(shard):
        first, last = start + int(written[0]), start + int(written[-1]) + 1
        states = slice(first - 1, last - 1)
        yield Text(
            shard.tokens[first:last],
            shard.hidden[states],
            shard.top_ids[states],
            shard.top_log_probs[states],
        )


def _walk(
    accepted: NDArray[np.int64], root: int, last: int, shape: TreeShape, total: DecodingStats
) -> None:
    nodes = shape.tree_nodes or 0
    while root < last:
        # The token after the accepted drafts is the target's own, if the text does not end before.
        step = min(int(accepted[root]) + 1, last - root)
        total.count_step(int(accepted[root]), nodes, nodes)
        total.num_tokens += step
        root += step


def count_accepted(
    drafter: Drafter,
    embed: Embed,
    shard: Shard,
    roots: NDArray[np.int64],
    shape: TreeShape,
    temp: float = 0.0,
) -> NDArray[np.int64]:
    """Drafts accepted in a step with each of these tokens as its root.

    Args:
        drafter: The network.
        embed: The target's input embedding.
        shard: Texts.
        roots: Indices of tokens in the shard, none of them the first of a text, shape (p,).
        shape: What is drafted.
        temp: At which the texts were sampled; 0 drafts without noise.

    Returns:
        int64, shape (p,).
    """
    length = shape.beam_length
    widest = max(shape.beam_width, length) if temp else shape.beam_width
    size = LOGITS_BYTES // (4 * drafter.config.head_rows * widest)
    size = max(1, min(MAX_POSITIONS, size))
    tokens = np.array(shard.tokens)
    following = _following(shard, roots, length)
    draft = mx.vmap(_drafting(drafter, embed, shape, temp))
    counts = []
    for start in range(0, len(roots), size):
        places = roots[start : start + size]
        inputs = [shard.hidden[mx.array(places - 1)], mx.array(tokens[places][:, None])]
        if temp:
            inputs.append(_noise(shard, places, length, drafter.config.vocab_size, temp))
        drafted = draft(*inputs)
        mx.eval(drafted)
        nodes, parents, depths = (np.array(array) for array in drafted)
        counts.append(_accept(nodes, parents, depths, following[start : start + size]))
    return np.concatenate(counts)


def _drafting(
    drafter: Drafter, embed: Embed, shape: TreeShape, temp: float
) -> Callable[..., tuple[mx.array, ...]]:
    """Of a hidden state (H,), a root (1,) and, at a temperature, noise (L - 1, V), the tree."""
    params, enter = SamplingParams(temp=temp), drafter.input_of(embed)

    def draft(
        hidden: mx.array, root: mx.array, noise: mx.array | None = None
    ) -> tuple[mx.array, ...]:
        rank = None if noise is None else GumbelNoise(params, noise).ranking(drafter)
        tree = best_nodes(expand(drafter, enter, hidden, root, shape, rank), root, shape)
        return tree.tokens, tree.parents, tree.depths

    return draft


def _noise(
    shard: Shard, roots: NDArray[np.int64], length: int, vocab_size: int, temp: float
) -> mx.array:
    """Noise of the choices that drafts of each depth guess, float32, shape (p, L - 1, V)."""
    # Past the end of the texts nothing is accepted, whatever is drafted.
    states = np.minimum(roots[:, None] + np.arange(length - 1), shard.tokens.shape[0] - 2)
    used, rows = np.unique(states, return_inverse=True)
    noise = noise_of_choices(shard, mx.array(used), vocab_size, temp)
    return noise[mx.array(rows.reshape(states.shape))]


def _following(shard: Shard, roots: NDArray[np.int64], length: int) -> NDArray[np.int32]:
    """The L tokens after each root, END after the end of its text, int32, shape (p, L)."""
    starts = np.array(shard.starts)
    tokens = np.append(np.array(shard.tokens), np.int32(END))
    ends = starts[np.searchsorted(starts, roots, side="right")]
    ahead = roots[:, None] + np.arange(1, length + 1)
    return tokens[np.where(ahead < ends[:, None], ahead, -1)]


def _accept(
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    depths: NDArray[np.int32],
    following: NDArray[np.int32],
) -> NDArray[np.int64]:
    """`mlx_redrafter.decoding.accept.accept` for many trees, each of shape (N,) in an array of (p, N).

    On the host, and node by node: under ``mx.vmap`` the operators ``|`` and ``&`` of MLX 0.32 read
    past the end of an operand that is not mapped.
    """
    rows = np.arange(len(tokens))
    on_path = np.zeros(tokens.shape, np.bool_)
    on_path[:, 0] = True
    for node in range(1, tokens.shape[1]):
        parent = parents[:, node]
        matches = tokens[:, node] == following[rows, depths[rows, parent]]
        on_path[:, node] = on_path[rows, parent] & matches
    return on_path.sum(axis=1) - 1
