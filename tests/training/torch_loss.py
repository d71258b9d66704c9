"""The losses that the trainer computes in torch and float64, position by position.

Axes: B positions, S levels of drafts, V rows of the head, k kept tokens.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def divergence(log_q: Tensor, ids: Tensor, log_p: Tensor, tail: Tensor) -> Tensor:
    """KL over the kept tokens, and one event for all others."""
    kept = (log_p.exp() * (log_p - log_q[ids])).sum()
    return kept + torch.xlogy(tail, tail) - tail * _rest(log_q, ids).log()


def agreement(log_q: Tensor, ids: Tensor, log_p: Tensor, tail: Tensor) -> Tensor:
    """Chance that both choose the same kept token with the same noise, by pairs."""
    p = torch.cat([log_p.exp(), tail[None]])
    q = torch.cat([log_q[ids].exp(), _rest(log_q, ids)[None]])
    pairs = torch.maximum(p / p[:-1, None], q / q[:-1, None])
    return (1 / pairs.sum(1)).sum()


def distance(log_q: Tensor, ids: Tensor, log_p: Tensor, tail: Tensor) -> Tensor:
    """Distances of probabilities over the kept tokens, and one event for all others."""
    return (log_p.exp() - log_q[ids].exp()).abs().sum() + (tail - _rest(log_q, ids)).abs()


def _rest(log_q: Tensor, ids: Tensor) -> Tensor:
    others = torch.ones(log_q.shape[-1], dtype=torch.bool)
    others[ids] = False
    return log_q[others].exp().sum()


def loss(
    logits: Callable[[int], Sequence[Tensor]],
    batch: Mapping[str, Tensor],
    recipe: str,
    decay: float,
    floor: float,
) -> Tensor:
    """Compute the loss of a whole batch.

    Args:
        logits: The logits of all levels, shape (V,), of a row of the batch.
        batch: Arrays of `TrainingBatch`, in float64 or integers.
        recipe: The recipe.
        decay: Weight of each level relative to the one before.
        floor: Smoothing of the chance that the drafts before a level are accepted.
    """
    counts, total = batch["weights"].sum(0), torch.zeros((), dtype=torch.float64)
    for row, weights in enumerate(batch["weights"]):
        reached = 1.0
        for level, found in enumerate(logits(row)):
            log_q = found.log_softmax(-1)
            given = (batch[name][row, level] for name in ("top_ids", "top_log_probs", "tail"))
            on_text = -log_q[batch["tokens"][row, level + 1]]
            if recipe == "apple":
                value = on_text
            elif recipe == "overlap":
                value = (0.1 * on_text + 0.9 * distance(log_q, *given)) * decay**level
            elif recipe == "soft":
                value = divergence(log_q, *given) * decay**level * reached
            else:
                value = -(agreement(log_q, *given) + 1e-4).log() * decay**level * reached
            if weights[level]:
                total = total + value * weights[level] / counts[level]
            label = log_q[batch["labels"][row, level]].detach()
            reached *= (1 - floor) * float(label.exp()) + floor
    return total
