"""Calibration of Medusa heads, and accuracies of their ranks, on sequences of their target.

Axes: p predictions, R ranks, V rows of a head.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.proposers.fit import Calibration, Prediction, ReadSequence, fit_depths, parts
from mlx_redrafter.proposers.medusa.config import MAX_RANKS
from mlx_redrafter.proposers.medusa.network import Medusa


def predict(network: Medusa, text: ReadSequence) -> list[Prediction]:
    """Predict with each head and each generated token as the root, up to the end."""
    hidden, length = text.states[text.num_prompt - 1 :], text.top_ids.shape[0]
    return [
        Prediction(
            network.logits(hidden[: length - ahead], head),
            text.top_ids[ahead:],
            text.top_log_probs[ahead:],
        )
        for head in range(network.config.num_heads)
        if (ahead := head + 1) < length
    ]


def calibrate(network: Medusa, texts: Iterable[ReadSequence]) -> Calibration:
    """Fit the scalars, the same for all heads, to sequences; waits for the device."""
    found = (predict(network, part) for text in texts for part in parts(text, 2))
    return fit_depths(network, found)[0]


def rank_accuracies(
    network: Medusa, texts: Iterable[ReadSequence]
) -> tuple[tuple[float, ...], ...]:
    """Estimate the chances that the target's token is the r-th most probable one of each head.

    The count of every rank begins with half a token, as even a rank that few texts never show has
    some chance. Waits for the device.
    """
    config = network.config
    num_ranks = min(MAX_RANKS, config.head_rows)
    counts, totals = [[0.5] * num_ranks for _ in range(config.num_heads)], [0] * config.num_heads
    for text in texts:
        for head, prediction in enumerate(predict(network, text)):
            best = mx.argsort(-prediction.logits.astype(mx.float32), axis=-1)[:, :num_ranks]
            is_right = network.to_token_ids(best) == prediction.chosen[:, None]  # (p, R)
            found = to_ints(mx.sum(is_right, axis=0))
            counts[head] = [a + b for a, b in zip(counts[head], found, strict=True)]
            totals[head] += is_right.shape[0]
    return tuple(
        tuple(count / (total + 0.5 * num_ranks) for count in row)
        for row, total in zip(counts, totals, strict=True)
    )
