"""The paper's static tree: drafts by their ranks among each head's tokens.

The score of a path of ranks is the product of their measured accuracies, whatever the
probabilities are at this step. The best paths are those that the paper finds one by one on
calibration data, adding the best neighbour each time.

Axes: K heads, R ranks, V rows of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_redrafter.proposers.factorised import FactorisedLevels
from mlx_redrafter.proposers.scores import bounded
from mlx_redrafter.trees.topk import top_k


def ranked_levels(
    log_probs: Callable[[int], mx.array],
    accuracies: Sequence[Sequence[float]],
    to_token_ids: Callable[[mx.array], mx.array],
) -> FactorisedLevels:
    """Make levels that propose ranks instead of rows of a head.

    Args:
        log_probs: Function from a depth to log-probabilities that rank its tokens; see
            `FactorisedLevels`.
        accuracies: Chance of every rank at each depth, K times R; R is at most V.
        to_token_ids: Function from rows of the head to token ids.
    """
    num_ranks = len(accuracies[0])
    logs = mx.log(mx.array([list(row) for row in accuracies], dtype=mx.float32))
    # Token ids by rank, at the depth scored last.
    newest = mx.zeros((num_ranks,), dtype=mx.int32)

    def score(depth: int) -> mx.array:
        nonlocal newest
        newest = to_token_ids(top_k(bounded(log_probs(depth)), num_ranks).indices[0])
        return logs[depth : depth + 1]

    return FactorisedLevels(score, num_ranks, lambda ranks: newest[ranks])
