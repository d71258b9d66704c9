"""Levels whose probabilities depend on the depth alone, not on the drafts above.

Axes: W beam width, V tokens that the network proposes.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx


class FactorisedLevels:
    """A network that scores the tokens of every depth by themselves; see `LevelScorer`.

    Args:
        log_probs: Function from a depth, 0 for the children of the root, to natural
            log-probabilities of the tokens after nodes of it, float32, shape (1, V).
        num_rows: See `LevelScorer.num_rows`.
        to_token_ids: See `LevelScorer.to_token_ids`.
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
        """See `LevelScorer.first`."""
        return self.log_probs(0)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """See `LevelScorer.following`; equal for all beams."""
        return mx.broadcast_to(self.log_probs(depth), (tokens.shape[0], self.num_rows))
