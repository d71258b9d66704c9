"""Slow, literal versions of the losses that the trainer computes, in numpy and float64.

Axes: B positions, S unroll steps, V rows of the head, k kept tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def log_softmax(values: Floats) -> Floats:
    """Natural log-probabilities."""
    top = values.max()
    return values - top - math.log(np.exp(values - top).sum())


def divergence(log_q: Floats, ids: Any, log_p: Any, tail: float) -> float:
    """KL over the kept tokens and one event for all others, term by term."""
    total = sum(math.exp(p) * (p - log_q[i]) for i, p in zip(ids, log_p, strict=True))
    rest = sum(math.exp(q) for i, q in enumerate(log_q) if i not in set(ids))
    return total + (tail * math.log(tail / rest) if tail > 0 else 0.0)


def agreement(log_q: Floats, ids: Any, log_p: Any, tail: float) -> float:
    """Compute the chance that both choose the same kept token with the same noise, by pairs."""
    rest = sum(math.exp(q) for i, q in enumerate(log_q) if i not in set(ids))
    p = [*(math.exp(value) for value in log_p), tail]
    q = [*(math.exp(log_q[i]) for i in ids), rest]
    return sum(
        1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(len(p))) for i in range(len(ids))
    )


def distance(log_q: Floats, ids: Any, log_p: Any, tail: float) -> float:
    """Sum the distances of probabilities over the kept tokens and one event for all others."""
    rest = sum(math.exp(q) for i, q in enumerate(log_q) if i not in set(ids))
    kept = sum(abs(math.exp(p) - math.exp(log_q[i])) for i, p in zip(ids, log_p, strict=True))
    return kept + abs(tail - rest)


def confidences(log_qs: list[Floats], labels: Any, floor: float) -> list[float]:
    """Compute the smoothed chance that the drafts before each step are accepted."""
    chances = [1.0]
    for log_q, label in zip(log_qs[:-1], labels[:-1], strict=True):
        chances.append(chances[-1] * ((1 - floor) * math.exp(log_q[label]) + floor))
    return chances


def loss(
    logits: Floats, batch: Mapping[str, Any], recipe: str, decay: float, rho: list[list[float]]
) -> float:
    """Compute the loss of a whole batch, position by position and step by step."""
    total = 0.0
    for row, step in np.argwhere(batch["weights"]):
        log_q = log_softmax(logits[row, step])
        count = batch["weights"][:, step].sum()
        on_text = -float(log_q[batch["tokens"][row, step + 1]])
        names = ("top_ids", "top_log_probs", "tail")
        ids, log_p, tail = (batch[name][row, step] for name in names)
        if recipe == "apple":
            value = on_text
        elif recipe == "overlap":
            value = (0.1 * on_text + 0.9 * distance(log_q, ids, log_p, tail)) * decay**step
        elif recipe == "soft":
            value = divergence(log_q, ids, log_p, tail) * decay**step * rho[row][step]
        else:
            value = -math.log(agreement(log_q, ids, log_p, tail) + 1e-4)
            value *= decay**step * rho[row][step]
        total += value / count
    return total
