"""Beam search with the drafter, level by level, as arrays of fixed shape.

Axes: W beam width, L beam length (root included), K nodes scored per level, M in all, H hidden
size, V head rows.

A search never duplicates a prefix: the nodes that it scores are distinct continuations of distinct
prefixes, so they are already a tree. `tree.py` decides which nodes of it are verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.config import TreeShape
from mlx_redrafter.proposers.redrafter.network import Drafter, Embed
from mlx_redrafter.topk import TopK, top_k

# Stands for log-probabilities that are NaN or minus infinity, so that order stays defined.
LEAST_LOG_PROB = -1e30

# From log-probabilities of the tokens after nodes of one depth to what nodes are ranked by.
Rank = Callable[[mx.array, int], mx.array]


class Expansion(NamedTuple):
    """The nodes that a beam search scored, as many per level and the best first.

    Node ids count from 0 in their order. The first W of every level were expanded; those of the
    last level are what the W beams end with.

    Attributes:
        tokens: Token ids, int32, shape (M,).
        scores: Sum of natural log-probabilities from the root, float32, shape (M,).
        parents: Node id of the parent, int32, shape (M,); -1 where it is the root.
    """

    tokens: mx.array
    scores: mx.array
    parents: mx.array


def expand(
    drafter: Drafter,
    enter: Embed,
    hidden: mx.array,
    root: mx.array,
    shape: TreeShape,
    rank: Rank | None = None,
) -> Expansion:
    """Score the best continuations of the root, and those of the W best nodes of every level.

    Args:
        drafter: The network.
        enter: `Drafter.project_input` of tokens: ids of shape (n,) to rows of shape (n, H).
        hidden: The target's last hidden state that predicted the root, shape (H,).
        root: The newest token, integer, shape (1,).
        shape: W, L and how many nodes of a level are scored, at most V; M is all of them.
        rank: Replaces the drafter's log-probabilities, shape (W, V), by others of that shape; None
            ranks by the drafter's own.

    Returns:
        The scored nodes. Nothing is read by the host.
    """
    width, rows = shape.beam_width, drafter.config.head_rows
    count = min(shape.level_nodes, rows)
    hidden = hidden.astype(drafter.dtype)
    share = drafter.hidden_term(hidden)
    # The noise of a sampling target makes its choices as uncertain as the drafter takes them for.
    scale = drafter.config.score_scale if rank is None else 1.0

    def best_after(state: mx.array, before: mx.array, depth: int) -> TopK:
        """The best continuations of nodes with these states and scores, (1, K) of (W * V)."""
        log_probs = drafter.log_probs(hidden, state, share, scale)
        if rank is not None:
            log_probs = rank(log_probs, depth)
        scores = before[:, None] + log_probs
        scores = mx.where(scores > LEAST_LOG_PROB, scores, LEAST_LOG_PROB)
        return top_k(scores.reshape(1, -1), count)

    state = drafter.start(enter(root))  # (1, H)
    best = best_after(state, mx.zeros((1,)), 0)
    tokens, scores = drafter.to_token_ids(best.indices[0]), best.values[0]
    levels = [(tokens, scores, mx.full((count,), -1, dtype=mx.int32))]
    for depth in range(1, shape.draft_length):
        # (W, H); the beams of the first level share the root's state.
        state = drafter.advance(state, enter(tokens[:width]))
        best = best_after(state, scores[:width], depth)
        chosen, scores = best.indices[0].astype(mx.int32), best.values[0]
        if width == 1:
            parents = mx.full((1,), depth - 1, dtype=mx.int32)
        else:
            # Not mx.divmod, which aborts the process under mx.vmap (MLX 0.32).
            beams, chosen = chosen // rows, chosen % rows
            parents, state = beams + (depth - 1) * count, state[beams[:width]]
        tokens = drafter.to_token_ids(chosen)
        levels.append((tokens, scores, parents))

    return Expansion(*(mx.concatenate(list(parts)) for parts in zip(*levels, strict=True)))
