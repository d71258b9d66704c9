"""Log-probabilities of the tokens of a prompt, for clients that compare likelihoods."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.device_read import to_floats, to_ints
from mlx_redrafter.engine.engine import Engine

# Tokens whose logits are in memory at a time: 150 MB for a vocabulary of 150,000 in float32.
CHUNK = 256

# A token id and its log-probability, and the most probable ones at its place.
Score = tuple[int, float]


def score_prompt(
    engine: Engine, tokens: list[int], num_top: int
) -> Iterator[list[tuple[Score, list[Score]]]]:
    """Yield the scores of every token but the first, and the ``num_top`` best there, by chunks."""
    model = engine.target.stock_model
    cache = make_prompt_cache(engine.target.model)
    for start in range(0, len(tokens) - 1, CHUNK):
        chunk = tokens[start : start + CHUNK]
        logits = model(mx.array([chunk]), cache=cache)[0].astype(mx.float32)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        following = tokens[start + 1 : start + 1 + len(chunk)]
        rows = scores[: len(following)]
        chosen = to_floats(mx.take_along_axis(rows, mx.array(following)[:, None], axis=1)[:, 0])
        best = mx.argsort(-rows, axis=-1)[:, :num_top]
        best_ids = to_ints(best.reshape(-1))
        best_scores = to_floats(mx.take_along_axis(rows, best, axis=-1).reshape(-1))
        mx.eval([layer.state for layer in cache])
        best_pairs = list(zip(best_ids, best_scores, strict=True))
        yield [
            ((token, chosen[i]), best_pairs[i * num_top : (i + 1) * num_top])
            for i, token in enumerate(following)
        ]
