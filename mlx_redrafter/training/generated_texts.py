"""Self-generated texts in a shard: the tokens after each token, and posterior Gumbel noise.

Decoding with a seed ranks drafts with the Gumbel noise that the target will sample with. A sampled
text restricts this noise to values with which the target chooses its tokens. Drafting with noise
from this posterior gives, on average, the result of decoding.

Axes: n choices, p roots, k kept tokens, V vocabulary, L beam length.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.decoding.sampling import gumbel_noise
from mlx_redrafter.proposers.fit import ReadSequence
from mlx_redrafter.training.loss import LEAST_TAIL
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.trees.tree import NO_TOKEN

# Token after the end of a text; no node of a tree has it, so no draft is accepted there.
END = NO_TOKEN - 1


def find_generated(shard: Shard) -> list[tuple[int, NDArray[np.int64]]]:
    """Find texts with two generated tokens or more: start and indices of these tokens within."""
    is_trained, starts = np.array(shard.is_trained), np.array(shard.starts)
    texts = [(int(a), np.flatnonzero(is_trained[a:b])) for a, b in pairwise(starts)]
    return [(start, where) for start, where in texts if len(where) > 1 and where[0] > 0]


def iterate_texts(shards: Iterable[Shard]) -> Iterator[ReadSequence]:
    """Iterate over the texts with a generated part, with the target's outputs and states."""
    for shard in shards:
        states = shard.hidden if shard.states is None else shard.states
        for start, generated in find_generated(shard):
            first, end = start + int(generated[0]), start + int(generated[-1]) + 1
            yield ReadSequence(
                shard.tokens[start:end],
                first - start,
                states[start : end - 1],
                shard.top_ids[first - 1 : end - 1],
                shard.top_log_probs[first - 1 : end - 1],
            )


def read_following(shard: Shard, roots: NDArray[np.int64], length: int) -> NDArray[np.int32]:
    """Read the L tokens after each root, END past the end of its text, int32, shape (p, L)."""
    starts = np.array(shard.starts)
    tokens = np.append(np.array(shard.tokens), np.int32(END))
    ends = starts[np.searchsorted(starts, roots, side="right")]
    ahead = roots[:, None] + np.arange(1, length + 1)
    return tokens[np.where(ahead < ends[:, None], ahead, -1)]


def sample_posterior_noise(
    shard: Shard, states: mx.array, vocab_size: int, temp: float, seed: int = 0
) -> mx.array:
    """Sample Gumbel noise with which the target chooses the tokens of a text.

    The largest noisy log-probability is Gumbel distributed and independent of its token; the other
    ones are Gumbel distributed below it (top-down sampling, arXiv 1411.0030). Tokens beyond the
    kept ones share their probability evenly. The noise after a token is the same whenever it is
    drawn.

    ``states`` are indices of the tokens before the choices, integer, shape (n,), and ``temp`` is
    above 0. The text does not determine all of the noise; the ``seed`` does the rest. With it
    ``argmax(log_probs / temp + noise)`` is the next token; float32, shape (n, V).
    """
    # Past the end of the texts any noise is right, because no draft is accepted there.
    states = mx.minimum(states, shard.tokens.shape[0] - 2)
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
    tail = mx.maximum(shard.tail[states], LEAST_TAIL)
    others = max(1, vocab_size - shard.top_ids.shape[-1])
    spread = mx.repeat(mx.log(tail / others)[:, None], vocab_size, axis=1)
    known = shard.top_log_probs[states].astype(mx.float32)
    return mx.put_along_axis(spread, shard.top_ids[states], known, axis=-1)
