"""Slow, literal versions of what the trainer computes, in numpy and float64.

Axes: B positions, S unroll steps, H hidden size, V rows of the head, k kept tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Weights = Mapping[str, Floats]


def silu(x: Floats) -> Floats:
    """``x * sigmoid(x)``."""
    return x / (1 + np.exp(-x))


def logits(
    weights: Weights, num_layers: int, hidden: Floats, embeddings: list[Floats]
) -> list[Floats]:
    """Compute the drafter's logits after each embedded token, by the formulas of the paper."""
    state = np.zeros(hidden.shape)
    results = []
    for embedding in embeddings:
        state = silu(
            weights["rnn_w.weight"] @ embedding
            + weights["rnn_u.weight"] @ state
            + weights["rnn_u.bias"]
        )
        x = np.concatenate([hidden, state])
        if "input_proj.weight" in weights:
            x = weights["input_proj.weight"] @ x + weights["input_proj.bias"]
        for layer in range(num_layers):
            linear = f"lm_head.{layer}.linear"
            x = x + silu(weights[f"{linear}.weight"] @ x + weights[f"{linear}.bias"])
        results.append(weights[f"lm_head.{num_layers}.weight"] @ x)
    return results


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
    weights: Weights,
    num_layers: int,
    table: Floats,
    batch: Mapping[str, Any],
    recipe: str,
    decay: float,
    rho: list[list[float]],
) -> float:
    """Compute the loss of a whole batch, position by position and step by step."""
    num_steps = batch["weights"].shape[1]
    total = 0.0
    for step in range(num_steps):
        count = sum(row[step] for row in batch["weights"])
        for row in range(len(batch["tokens"])):
            if not batch["weights"][row][step]:
                continue
            tokens = batch["tokens"][row]
            log_q = log_softmax(
                logits(
                    weights,
                    num_layers,
                    batch["states"][row],
                    [table[token] for token in tokens[: step + 1]],
                )[step]
            )
            if recipe in ("soft", "coupled", "overlap"):
                teacher = (
                    batch["top_ids"][row][step],
                    batch["top_log_probs"][row][step],
                    float(batch["tail"][row][step]),
                )
                if recipe == "soft":
                    value = divergence(log_q, *teacher)
                elif recipe == "overlap":
                    total += 0.1 * -float(log_q[tokens[step + 1]]) * decay**step / count
                    total += 0.9 * distance(log_q, *teacher) * decay**step / count
                    continue
                else:
                    value = -math.log(agreement(log_q, *teacher) + 1e-4)
                value *= decay**step * rho[row][step]
            else:
                value = -float(log_q[tokens[step + 1]])
            total += value / count
    return total
