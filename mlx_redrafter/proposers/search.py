"""Beam search with any network that scores continuations level by level, as arrays of fixed shape.

Axes: R roots, W beam width, L beam length (root included), K nodes scored per level, M in all, V
tokens that the network proposes.

A search never duplicates a prefix: the nodes that it scores are distinct continuations of distinct
prefixes, so they are already a tree. `expansion.py` selects the nodes that the target verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.expansion import Expansion
from mlx_redrafter.proposers.scores import Rank, bounded
from mlx_redrafter.trees.topk import TopK, top_k


class LevelScorer(Protocol):
    """A network about to draft after R roots, mostly one; it scores one level after another."""

    @property
    def num_rows(self) -> int:
        """Number of tokens that the network proposes, V."""
        ...

    def first(self) -> mx.array:
        """Return natural log-probabilities of tokens after the roots, float32, shape (R, V)."""
        ...

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """Return natural log-probabilities of the tokens after the beams, one token longer each.

        Args:
            beams: For each beam, the index of the one that it continues, int32, shape (R * W,);
                the beams of a root are neighbours. None if every beam continues the beam of its own
                index, or the only root.
            tokens: Newest tokens of the beams, int32, shape (R * W,).
            depth: Depth of those tokens, 1 for the children of the roots.

        Returns:
            float32, shape (R * W, V).
        """
        ...

    def to_token_ids(self, rows: mx.array) -> mx.array:
        """Return token ids, int32, of indices into V; any shape."""
        ...


def search_all(levels: LevelScorer, shape: DraftShape, rank: Rank | None = None) -> Expansion:
    """Score the best continuations of every root, and those of the W best nodes of every level.

    Every root has a search of its own, in the same calls of the network. The host reads nothing.

    Args:
        levels: The network, after the roots.
        shape: W, L and the number of nodes to score per level, at most V.
        rank: Function that replaces log-probabilities, shape (R * W, V), by others of that shape;
            None ranks by the network's own.

    Returns:
        Arrays with an axis of R before their own.
    """
    width, rows, log_probs = shape.width, levels.num_rows, levels.first()
    roots, count = log_probs.shape[0], min(shape.level_nodes, rows)

    def best_of(log_probs: mx.array, before: mx.array | None, depth: int) -> TopK:
        """Choose the best continuations of nodes with scores (R, W), or of the roots."""
        if rank is not None:
            log_probs = rank(log_probs, depth)
        if before is not None:
            log_probs = before.reshape(-1, 1) + log_probs
        return top_k(bounded(log_probs).reshape(roots, -1), count)

    best = best_of(log_probs, None, 0)
    tokens, scores = levels.to_token_ids(best.indices), best.values
    found = [(tokens, scores, mx.full((roots, count), -1, dtype=mx.int32))]
    first_beams = mx.arange(roots, dtype=mx.int32)[:, None]
    beams = None if 1 in (roots, width) else mx.repeat(first_beams, width)
    for depth in range(1, shape.levels):
        newest = tokens[:, :width].reshape(-1)
        best = best_of(levels.following(beams, newest, depth), scores[:, :width], depth)
        chosen, scores = best.indices.astype(mx.int32), best.values
        if width == 1:
            parents = mx.full((roots, 1), depth - 1, dtype=mx.int32)
        else:
            # Not mx.divmod, which aborts the process under mx.vmap (MLX 0.32).
            above, chosen = chosen // rows, chosen % rows
            parents = above + (depth - 1) * count
            beams = (above[:, :width] + first_beams * width).reshape(-1)
        tokens = levels.to_token_ids(chosen)
        found.append((tokens, scores, parents))

    return Expansion(*(mx.concatenate(list(parts), axis=1) for parts in zip(*found, strict=True)))


@dataclass(frozen=True)
class FactorisedLevels:
    """A network that scores the tokens of every depth by themselves; a `LevelScorer`.

    Its probabilities depend on the depth alone, and not on the drafts above.

    Attributes:
        log_probs: Function from a depth, 0 for the children of the root, to natural
            log-probabilities of the tokens after nodes of it, float32, shape (R, V).
        num_rows: Number of tokens that the network proposes, V.
        to_token_ids: Function from indices into V to token ids, int32.
    """

    log_probs: Callable[[int], mx.array]
    num_rows: int
    to_token_ids: Callable[[mx.array], mx.array]

    def first(self) -> mx.array:
        return self.log_probs(0)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        rows = self.log_probs(depth)
        if rows.shape[0] == 1:
            return mx.broadcast_to(rows, (tokens.shape[0], self.num_rows))
        return mx.repeat(rows, tokens.shape[0] // rows.shape[0], axis=0)
