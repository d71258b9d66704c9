"""Levels whose probabilities depend on the depth alone, and not on the drafts above.

Axes: R roots, W beam width, V tokens that the network proposes.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx


class FactorisedLevels:
    """A network that scores the tokens of every depth by themselves; a `LevelScorer`.

    Args:
        log_probs: Function from a depth, 0 for the children of the root, to natural
            log-probabilities of the tokens after nodes of it, float32, shape (R, V).
        num_rows: Number of tokens that the network proposes, V.
        to_token_ids: Function from indices into V to token ids, int32.
    """

    def __init__(
        self,
        log_probs: Callable[[int], mx.array],
        num_rows: int,
        to_token_ids: Callable[[mx.array], mx.array],
    ):
        self.log_probs = log_probs
        self.num_rows = num_rows
        self.to_token_ids = to_token_ids

    def first(self) -> mx.array:
        return self.log_probs(0)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        rows = self.log_probs(depth)
        if rows.shape[0] == 1:
            return mx.broadcast_to(rows, (tokens.shape[0], self.num_rows))
        return mx.repeat(rows, tokens.shape[0] // rows.shape[0], axis=0)
