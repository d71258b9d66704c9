"""The target's outputs on all sequences, and the inputs of its layers.

Axes: n tokens, B sequences at once, c tokens of each sequence at once, V vocabulary, H hidden size,
C layers, k kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.decoding.sampling import top_k
from mlx_redrafter.errors import NonFiniteError
from mlx_redrafter.target.target import Target, TargetOutputs
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.loss import IMPOSSIBLE
from mlx_redrafter.training.self_generated import pack_sequences, report_after
from mlx_redrafter.training.teacher_cache import Shard, Split, TeacherCache
from mlx_redrafter.training.text_batch import OnTokens

# Number of next tokens whose probabilities are cached; of held-out texts, which calibrate the
# drafter, `TOP_TOKENS`.
TOP_K = 32
# Number of tokens that closes a shard.
SHARD_TOKENS = 16384
# Number of sequences per forward pass.
BATCH_SEQUENCES = 8
# Maximum number of tokens per forward pass, so that an interruption waits for a short one.
MAX_CHUNK_TOKENS = 512
# Maximum size of the float32 logits of a forward pass, in bytes.
LOGITS_BYTES = 2**28

# The target's outputs at tokens, by the names of `Shard`, with its axes and dtypes.
TokenOutputs = dict[str, NDArray[Any]]


def fill_cache(
    cache: TeacherCache,
    split: Split,
    target: Target,
    sequences: Sequence[TokenSequence],
    k: int,
    layers: Sequence[int],
    on_tokens: OnTokens,
) -> None:
    """Run the target over the sequences; existing files are kept.

    The cache keeps the log-probabilities of k next tokens, and the inputs of some layers.
    ``on_tokens`` receives the number of tokens done so far.
    """
    done = 0
    for number, group in enumerate(group_by_tokens(sequences, SHARD_TOKENS)):
        if not (cache.has(split, number) and cache.has(split, number, layers)):
            shard = read_sequences(target, group, k, layers, partial(report_after, done, on_tokens))
            cache.save(split, number, shard, layers)
        done += sum(map(len, group))
        on_tokens(done)


def group_by_tokens(
    sequences: Sequence[TokenSequence], num_tokens: int
) -> Iterator[list[TokenSequence]]:
    """Group consecutive sequences; a group closes once it has ``num_tokens`` tokens."""
    group: list[TokenSequence] = []
    for sequence in sequences:
        group.append(sequence)
        if sum(map(len, group)) >= num_tokens:
            yield group
            group = []
    if group:
        yield group


def read_sequences(
    target: Target,
    sequences: Sequence[TokenSequence],
    k: int,
    layers: Sequence[int] = (),
    on_tokens: OnTokens = lambda count: None,
) -> Shard:
    """Compute hidden states, inputs of layers and most probable next tokens at every token.

    ``on_tokens`` receives the number of tokens done, after every pass.
    """
    total = sum(map(len, sequences))
    k = min(k, target.vocab_size)
    outputs: TokenOutputs = {
        "hidden": np.zeros((total, target.hidden_size), np.float16),
        "top_ids": np.zeros((total, k), np.int32),
        "top_log_probs": np.zeros((total, k), np.float16),
        "tail": np.zeros((total,), np.float32),
        "states": np.zeros((total, len(layers) * target.hidden_size), np.float16),
    }
    starts = np.cumsum([0, *map(len, sequences)])
    # Batches of similar length: shorter sequences are padded on the right, and no token before the
    # padding attends to it.
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    done = 0
    for first in range(0, len(order), BATCH_SEQUENCES):
        rows = order[first : first + BATCH_SEQUENCES]
        for _ in _read_batch(target, sequences, starts, rows, layers, outputs):
            on_tokens(done)
        done += sum(len(sequences[row]) for row in rows)
    if not np.isfinite(outputs["hidden"]).all() or not np.isfinite(outputs["tail"]).all():
        raise NonFiniteError(
            "expected finite hidden states and logits within float16 from the target, found NaN, "
            "infinity or larger values; this model cannot be used as a teacher"
        )
    if not np.isfinite(outputs["states"]).all():
        raise NonFiniteError(
            f"expected finite inputs of layers {list(layers)} within float16 from the target, "
            "found NaN, infinity or larger values; train a head that reads its last hidden state"
        )
    arrays = {name: mx.array(value) for name, value in outputs.items()}
    shard = Shard(**pack_sequences(sequences), **arrays)
    return shard if layers else replace(shard, states=None)


def _read_batch(
    target: Target,
    sequences: Sequence[TokenSequence],
    starts: NDArray[np.int64],
    rows: Sequence[int],
    layers: Sequence[int],
    outputs: TokenOutputs,
) -> Iterator[None]:
    """Write the outputs of some sequences; yields after every pass."""
    longest = max(len(sequences[row]) for row in rows)
    padded = np.zeros((len(rows), longest), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(sequences[row])] = sequences[row].tokens
    chunk = max(1, min(MAX_CHUNK_TOKENS, LOGITS_BYTES // 4 // target.vocab_size) // len(rows))
    cache = target.caches.new().stock
    k = outputs["top_ids"].shape[1]
    for begin in range(0, longest, chunk):
        tokens = mx.array(padded[:, begin : begin + chunk])
        found = summarise(target.compute(tokens, cache, layers), k)
        size = found["hidden"].shape[1]
        for index, row in enumerate(rows):
            count = min(size, len(sequences[row]) - begin)
            if count > 0:
                where = slice(starts[row] + begin, starts[row] + begin + count)
                for name, values in found.items():
                    outputs[name][where] = values[index, :count]
        yield


def summarise(outputs: TargetOutputs, k: int) -> TokenOutputs:
    """Keep the k most probable next tokens, and the rest's probability; blocks until evaluated."""
    logits, hidden = outputs.logits, outputs.hidden_states
    states = hidden[..., :0] if outputs.states is None else outputs.states
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
        "states": states.astype(mx.float16),
    }
    mx.eval(arrays)
    return {name: np.array(array) for name, array in arrays.items()}
