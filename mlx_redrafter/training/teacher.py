"""Texts that the target reads, and its outputs at their tokens, as its passes give them.

Axes: B texts of a pass, c tokens of each, V vocabulary, H hidden size, C layers, k kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.decoding.sampling import top_k
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.loss import IMPOSSIBLE
from mlx_redrafter.training.teacher_cache import (
    Shard,
    Split,
    TeacherCache,
    pack_sequences,
    unpack_sequences,
)

BATCH_SEQUENCES = 8
# Maximum number of tokens of a pass over texts, so that an interruption waits for a short one.
MAX_CHUNK_TOKENS = 512
# Maximum size of the float32 logits of such a pass, in bytes.
LOGITS_BYTES = 2**28
# Number of next tokens whose probabilities are cached; of held-out texts, which calibrate the
# drafter, `TOP_TOKENS`.
TOP_K = 32
# Number of tokens that closes a shard.
SHARD_TOKENS = 16384

# Called with the number of tokens that are done since the last call, after every pass.
OnTokens = Callable[[int], None]


def chunk_tokens(vocab_size: int, num_texts: int) -> int:
    """Count the tokens of each text in a pass over several."""
    return max(1, min(MAX_CHUNK_TOKENS, LOGITS_BYTES // 4 // vocab_size) // num_texts)


class TeacherOutputs:
    """Outputs at every token of some texts, each of which has room for a number of tokens.

    They are zeros at tokens that no pass has read, such as the last one of a generated text.
    """

    def __init__(self, target: Target, room: Sequence[int], k: int, layers: Sequence[int] = ()):
        self.layers = layers
        self._k = k = min(k, target.vocab_size)
        self._starts = np.cumsum([0, *room])
        total, size = int(self._starts[-1]), target.hidden_size
        self._arrays: dict[str, NDArray[Any]] = {
            "hidden": np.zeros((total, size), np.float16),
            "top_ids": np.zeros((total, k), np.int32),
            "top_log_probs": np.zeros((total, k), np.float16),
            "tail": np.zeros((total,), np.float32),
            "states": np.zeros((total, len(layers) * size), np.float16),
        }

    def after(self, first: int) -> TeacherOutputs:
        """Return the same outputs, with the texts numbered from one of them."""
        rest = copy(self)
        rest._starts = self._starts[first:]
        return rest

    def write(
        self,
        texts: Sequence[int],
        begins: NDArray[np.int64],
        counts: NDArray[np.int64],
        outputs: TargetOutputs,
    ) -> None:
        """Keep the outputs of a pass, shape (B, c); blocks until MLX has evaluated them.

        ``texts`` are the numbers of its texts, B of them; a pass of shape (1, c) may be that of
        several texts with the same tokens. ``begins`` are the indices of its first tokens in them,
        shape (B,). Of its tokens, ``counts`` are no padding, shape (B,).
        """
        found = _summarise(outputs, self._k)
        offsets = np.arange(outputs.logits.shape[1])
        is_real = offsets < counts[:, None]
        where = ((self._starts[list(texts)] + begins)[:, None] + offsets)[is_real]
        for name, values in found.items():
            rows = np.broadcast_to(np.array(values), (len(texts), *values.shape[1:]))
            self._arrays[name][where] = rows[is_real]

    def make_shard(self, sequences: Sequence[TokenSequence]) -> Shard:
        """Join all texts, which have at most as many tokens as there is room for.

        Raise `NonFiniteError` if hidden states or logits are not finite, or beyond float16.
        """
        kept = self._arrays
        if not np.isfinite(kept["hidden"]).all() or not np.isfinite(kept["tail"]).all():
            raise NonFiniteError(
                "expected finite hidden states and logits within float16 from the target, found "
                "NaN, infinity or larger values; this model cannot be used as a teacher"
            )
        if not np.isfinite(kept["states"]).all():
            raise NonFiniteError(
                f"expected finite inputs of layers {list(self.layers)} within float16 from the "
                "target, found NaN, infinity or larger values; train a head that reads its last "
                "hidden state"
            )
        pairs = zip(self._starts, sequences, strict=False)
        where = np.concatenate([start + np.arange(len(sequence)) for start, sequence in pairs])
        found = {name: mx.array(values[where]) for name, values in kept.items()}
        shard = Shard(**pack_sequences(sequences), **found)
        return shard if self.layers else replace(shard, states=None)


def _summarise(outputs: TargetOutputs, k: int) -> dict[str, mx.array]:
    """Keep the k most probable next tokens and the probability of all others, by `Shard`'s names.

    Keep the inputs of layers alone if ``k`` is 0. Blocks until MLX has evaluated them.
    """
    logits, hidden = outputs.logits, outputs.hidden_states
    states = (hidden[..., :0] if outputs.states is None else outputs.states).astype(mx.float16)
    if k == 0:  # the logits are never computed
        mx.eval(states)
        return {"states": states}
    batch, size, vocab = logits.shape
    flat = logits.reshape(-1, vocab).astype(mx.float32)
    values, indices = top_k(flat, k)
    log_probs = values - mx.logsumexp(flat, axis=-1, keepdims=True)
    # The tail is computed before the kept log-probabilities are rounded to float16.
    tail = mx.maximum(1.0 - mx.sum(mx.exp(log_probs), axis=-1), 0.0)
    if k == vocab:
        tail = mx.zeros_like(tail)
    tail = tail + 0.0 * log_probs[:, 0]  # NaN stays NaN
    log_probs = mx.maximum(log_probs, IMPOSSIBLE)
    arrays = {
        "hidden": hidden.astype(mx.float16),
        "top_ids": indices.astype(mx.int32).reshape(batch, size, k),
        "top_log_probs": log_probs.astype(mx.float16).reshape(batch, size, k),
        "tail": tail.reshape(batch, size),
        "states": states,
    }
    mx.eval(arrays)
    return arrays


@dataclass(frozen=True)
class Teacher:
    """A target whose outputs on texts go to a split of a cache.

    The cache keeps the log-probabilities of ``k`` next tokens, and the inputs of some layers.
    """

    target: Target
    cache: TeacherCache
    split: Split
    k: int
    layers: Sequence[int]

    def read(
        self, sequences: Sequence[TokenSequence], on_tokens: OnTokens
    ) -> list[list[TokenSequence]]:
        """Read texts into shards, numbered from 0; return those that each of them holds."""
        groups: list[list[TokenSequence]] = []
        for sequence in sequences:
            if not groups or sum(map(len, groups[-1])) >= SHARD_TOKENS:
                groups.append([])
            groups[-1].append(sequence)
        return [self.read_shard(number, group, on_tokens) for number, group in enumerate(groups)]

    def read_shard(
        self, number: int, sequences: Sequence[TokenSequence], on_tokens: OnTokens
    ) -> list[TokenSequence]:
        """Read the texts of one shard, unless its files exist, and return those that it holds."""
        k = self.k
        if self.cache.has(self.split, number):  # with texts of another day, or without layers
            sequences = unpack_sequences(self.cache.load(self.split, number).arrays())
            k = 0  # the shard stays
        if all(self.cache.has(self.split, number, layers) for layers in ((), self.layers)):
            on_tokens(sum(map(len, sequences)))
        else:
            shard = read_sequences(self.target, sequences, k, self.layers, on_tokens)
            self.cache.save(self.split, number, shard, self.layers)
        return list(sequences)


def read_sequences(
    target: Target,
    sequences: Sequence[TokenSequence],
    k: int,
    layers: Sequence[int] = (),
    on_tokens: OnTokens = lambda count: None,
) -> Shard:
    """Compute hidden states, inputs of layers and most probable next tokens at every token."""
    outputs = TeacherOutputs(target, [len(one) for one in sequences], k, layers)
    # Batches of similar length: shorter sequences are padded on the right, and no token before the
    # padding attends to it.
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    for first in range(0, len(order), BATCH_SEQUENCES):
        rows = order[first : first + BATCH_SEQUENCES]
        lengths = np.array([len(sequences[row]) for row in rows])
        padded = np.zeros((len(rows), lengths.max()), np.int32)
        for index, row in enumerate(rows):
            padded[index, : len(sequences[row])] = sequences[row].tokens
        chunk = chunk_tokens(target.vocab_size, len(rows))
        cache = target.caches.new().stock
        for begin in range(0, padded.shape[1], chunk):
            tokens = mx.array(padded[:, begin : begin + chunk])
            found = target.compute(tokens, cache, layers)
            outputs.write(rows, np.full(len(rows), begin), lengths - begin, found)
            on_tokens(int(np.clip(lengths - begin, 0, chunk).sum()))
    return outputs.make_shard(sequences)
