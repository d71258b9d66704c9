"""Beam search with the drafter, level by level, as arrays of fixed shape.

Axes: W beam width, L beam length (root included), M nodes scored, H hidden size, V head rows.

A search never duplicates a prefix: the nodes it keeps per level are distinct continuations of
distinct prefixes, so the beams it ends with are already a tree. `tree.py` decides which nodes of
it are verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.config import TreeShape
from mlx_redrafter.drafter import Drafter
from mlx_redrafter.topk import TopK, top_k

# Stands for log-probabilities that are NaN or minus infinity, so that order stays defined.
LEAST_LOG_PROB = -1e30

Embed = Callable[[mx.array], mx.array]
# From log-probabilities of the tokens after nodes of one depth to what nodes are ranked by.
Rank = Callable[[mx.array, int], mx.array]


class Expansion(NamedTuple):
    """Every node that a beam search scored, level by level; node ids count from 0 in that order.

    Attributes:
        tokens: Token ids, int32, shape (M,).
        scores: Sum of natural log-probabilities from the root, float32, shape (M,).
        parents: Node id of the parent, int32, shape (M,); -1 where it is the root.
        beams: Node ids of the W beams that the search ended with, int32, shape (W,).
    """

    tokens: mx.array
    scores: mx.array
    parents: mx.array
    beams: mx.array


def expand(
    drafter: Drafter,
    embed: Embed,
    hidden: mx.array,
    root: mx.array,
    shape: TreeShape,
    rank: Rank | None = None,
) -> Expansion:
    """Score the continuations of the root, keeping W children of each of the W best nodes a level.

    Args:
        drafter: The network.
        embed: The target's input embedding: ids of shape (n,) to rows of shape (n, H).
        hidden: The target's last hidden state that predicted the root, shape (H,).
        root: The newest token, integer, shape (1,).
        shape: W and L; M is ``shape.num_drafted``.
        rank: Replaces the drafter's log-probabilities, shape (W, V), by others of that shape; None
            ranks by the drafter's own.

    Returns:
        The scored nodes. Nothing is read by the host.
    """
    width, dtype = shape.beam_width, drafter.dtype
    hidden = hidden.astype(dtype)
    share = drafter.hidden_share(hidden)
    # The noise of a sampling target makes its choices as uncertain as the drafter takes them for.
    scale = drafter.config.score_scale if rank is None else 1.0

    def best_after(state: mx.array, depth: int) -> TopK:
        log_probs = drafter.log_probs(hidden, state, share, scale)
        return top_k(_ranked(log_probs, depth, rank), width)

    state = drafter.start(embed(root).astype(dtype))  # (1, H)
    best = best_after(state, 0)
    tokens = drafter.to_token_ids(best.indices[0])  # (W,)
    scores = best.values[0]
    frontier = mx.arange(width, dtype=mx.int32)
    levels = [(tokens, scores, mx.full((width,), -1, dtype=mx.int32))]
    state = mx.repeat(state, width, axis=0)  # (W, H)

    for depth in range(2, shape.beam_length):
        state = drafter.advance(state, embed(tokens).astype(dtype))
        best = best_after(state, depth - 1)
        children = drafter.to_token_ids(best.indices).flatten()  # (W * W,)
        child_scores = (scores[:, None] + best.values).flatten()
        levels.append((children, child_scores, mx.repeat(frontier, width)))
        if width == 1:  # the only child is the best
            tokens, scores, frontier = children, child_scores, frontier + 1
            continue
        kept = top_k(child_scores[None], width)
        order = kept.indices[0].astype(mx.int32)
        tokens, scores, state = children[order], kept.values[0], state[order // width]
        frontier = order + (width + (depth - 2) * width**2)

    node_tokens, node_scores, parents = (
        mx.concatenate(list(parts)) for parts in zip(*levels, strict=True)
    )
    return Expansion(node_tokens, node_scores, parents, frontier)


def _ranked(log_probs: mx.array, depth: int, rank: Rank | None) -> mx.array:
    if rank is not None:
        log_probs = rank(log_probs, depth)
    return mx.where(log_probs > LEAST_LOG_PROB, log_probs, LEAST_LOG_PROB)
