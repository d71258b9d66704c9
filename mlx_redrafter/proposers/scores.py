"""Scores that drafts are ranked by: log-probabilities, and the target's noise on top of them.

Axes: W nodes of one depth, V tokens that the network proposes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

# Replaces log-probabilities that are NaN or minus infinity, so that order stays defined.
LEAST_LOG_PROB = -1e30
# Weight of the target's noise for networks that are not calibrated. All of it: their distribution
# is their own, not one that was fitted to greedy choices.
COUPLING_WEIGHT = 1.0

# Function from log-probabilities of the tokens after nodes of one depth to the scores that rank
# nodes; or of nodes of several depths, int32, one for each row.
Rank = Callable[[mx.array, int | mx.array], mx.array]


class NoiseRank(Protocol):
    """A `Rank` by the target's noise."""

    def __call__(
        self, log_probs: mx.array, depth: int | mx.array, /, *, token_ids: mx.array | None = ...
    ) -> mx.array:
        """Rank tokens; ``token_ids`` are those of the columns if not of all rows of the head."""
        ...


def log_probs(logits: mx.array, num_rows: int | None = None) -> mx.array:
    """Return natural log-probabilities of the first tokens, float32, shape (W, ``num_rows``)."""
    logits = logits[:, :num_rows].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def bounded(scores: mx.array) -> mx.array:
    """Return the scores with NaN and all below `LEAST_LOG_PROB` replaced by it."""
    return mx.where(scores > LEAST_LOG_PROB, scores, LEAST_LOG_PROB)
