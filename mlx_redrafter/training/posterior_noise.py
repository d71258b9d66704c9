"""Noise that a target may have sampled a text with.

Decoding with a seed ranks drafts with the noise that the target will choose with. A text that the
target sampled does not say what that noise was, but which noise makes the target choose just these
tokens. Drafting with noise drawn from among it is on average what decoding was.

Axes: n choices, k kept tokens, V vocabulary.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_redrafter.decoding.sampling import gumbel_noise
from mlx_redrafter.training.loss import LEAST_TAIL
from mlx_redrafter.training.teacher_cache import Shard


def noise_of_choices(
    shard: Shard, states: mx.array, vocab_size: int, temp: float, seed: int = 0
) -> mx.array:
    """Gumbel noise under which the target chooses the tokens after some states of a text.

    The largest of the noisy log-probabilities is Gumbel distributed and independent of which it
    is; the others are Gumbel distributed below it (top-down sampling, arXiv 1411.0030).

    Args:
        shard: Texts. Tokens beyond the kept ones share their probability evenly.
        states: Indices of tokens, none of them the last, integer, shape (n,).
        vocab_size: V.
        temp: Temperature at which the target samples, above 0.
        seed: Of what the text leaves open.

    Returns:
        float32, shape (n, V): ``argmax(log_probs / temp + noise)`` is the token after the state.
    """
    log_probs = _log_probs(shard, states, vocab_size) / temp
    log_probs = log_probs - mx.logsumexp(log_probs, axis=-1, keepdims=True)
    # One more than there are tokens: the largest.
    fresh = gumbel_noise(seed, states, vocab_size + 1)
    fresh, largest = fresh[:, :vocab_size], fresh[:, vocab_size:]
    below = -mx.logaddexp(-largest, -(log_probs + fresh))
    chosen = shard.tokens[states + 1][:, None]
    noisy = mx.where(mx.arange(vocab_size) == chosen, largest, below)
    return noisy - log_probs


def _log_probs(shard: Shard, states: mx.array, vocab_size: int) -> mx.array:
    """The target's, float32, shape (n, V)."""
    tail = mx.maximum(shard.tail[states], LEAST_TAIL)
    others = max(1, vocab_size - shard.top_ids.shape[-1])
    spread = mx.repeat(mx.log(tail / others)[:, None], vocab_size, axis=1)
    known = shard.top_log_probs[states].astype(mx.float32)
    return mx.put_along_axis(spread, shard.top_ids[states], known, axis=-1)
