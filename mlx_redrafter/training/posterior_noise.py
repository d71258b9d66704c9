"""Posterior Gumbel noise: the noise of sampling, given the tokens that the target sampled.

Decoding with a seed ranks drafts with the noise that the target will sample with. A sampled text
does not determine its noise, but it restricts the noise to values with which the target chooses
these tokens. Drafting with noise from this posterior gives, on average, the result of decoding.

Axes: n choices, k kept tokens, V vocabulary.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_redrafter.decoding.sampling import gumbel_noise
from mlx_redrafter.training.loss import LEAST_TAIL
from mlx_redrafter.training.teacher_cache import Shard


def sample_posterior_noise(
    shard: Shard, states: mx.array, vocab_size: int, temp: float, seed: int = 0
) -> mx.array:
    """Sample Gumbel noise with which the target chooses the tokens of a text.

    The largest noisy log-probability is Gumbel distributed and independent of its token; the other
    ones are Gumbel distributed below it (top-down sampling, arXiv 1411.0030). Tokens beyond the
    kept ones share their probability evenly.

    Args:
        shard: Sampled texts.
        states: Indices of the tokens before the choices, none of them the last, integer, shape
            (n,).
        vocab_size: V.
        temp: Sampling temperature of the target, above 0.
        seed: Random seed for the noise that the text does not determine.

    Returns:
        Noise with ``argmax(log_probs / temp + noise)`` the token after each state, float32, shape
        (n, V).
    """
    log_probs = _expand_log_probs(shard, states, vocab_size) / temp
    log_probs = log_probs - mx.logsumexp(log_probs, axis=-1, keepdims=True)
    # One draw more than there are tokens: the last is the largest noisy log-probability.
    fresh = gumbel_noise(seed, states, vocab_size + 1)
    fresh, largest = fresh[:, :vocab_size], fresh[:, vocab_size:]
    below = -mx.logaddexp(-largest, -(log_probs + fresh))
    chosen = shard.tokens[states + 1][:, None]
    noisy = mx.where(mx.arange(vocab_size) == chosen, largest, below)
    return noisy - log_probs


def _expand_log_probs(shard: Shard, states: mx.array, vocab_size: int) -> mx.array:
    """Expand the target's kept log-probabilities to all tokens, float32, shape (n, V)."""
    tail = mx.maximum(shard.tail[states], LEAST_TAIL)
    others = max(1, vocab_size - shard.top_ids.shape[-1])
    spread = mx.repeat(mx.log(tail / others)[:, None], vocab_size, axis=1)
    known = shard.top_log_probs[states].astype(mx.float32)
    return mx.put_along_axis(spread, shard.top_ids[states], known, axis=-1)
