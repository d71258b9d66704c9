"""The target's head, and the tokens of a reduced head, which a new drafter starts from.

Axes: V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.data import TokenSequence

# Number of columns of the head matrix computed at once.
CHUNK_SIZE = 1024


def select_frequent_tokens(
    sequences: Iterable[TokenSequence], always: Iterable[int], count: int, vocab_size: int
) -> NDArray[np.int32]:
    """Select the ids of a reduced head, ascending: ``always``, then the most frequent tokens."""
    if count > vocab_size:
        raise ConfigError(f"draft_vocab must be at most the model's {vocab_size}, got {count}")
    frequency = np.zeros(vocab_size, np.int64)
    for sequence in sequences:
        frequency += np.bincount(sequence.tokens, minlength=vocab_size)
    frequency[[token for token in always if token < vocab_size]] = np.iinfo(np.int64).max
    # A stable sort prefers the lower of equally frequent tokens: tokenizers number by frequency.
    return np.sort(np.argsort(-frequency, kind="stable")[:count]).astype(np.int32)


def compute_head_matrix(target: Target) -> mx.array | None:
    """Compute the matrix W of ``logits = W hidden``; blocks until MLX has evaluated it.

    It is float32, shape (V, H). None if the model has no linear head.
    """
    head = _find_head(target.model)
    apply = getattr(target.embedding, "as_linear", None) if head is None else head
    if apply is None:
        return None
    dtype = target.embed(mx.zeros((1,), dtype=mx.int32)).dtype
    identity = mx.eye(target.hidden_size).astype(dtype)
    columns = []
    for start in range(0, target.hidden_size, CHUNK_SIZE):
        chunk = apply(identity[start : start + CHUNK_SIZE])
        mx.eval(chunk)
        columns.append(chunk)
    matrix = mx.concatenate(columns).T.astype(mx.float32)
    return matrix if matrix.shape == (target.vocab_size, target.hidden_size) else None


def _find_head(model: Any) -> Any:
    """Find the module ``lm_head`` of the model or of the text model inside it."""
    heads = [
        module
        for name, module in model.named_modules()
        if name.split(".")[-1] == "lm_head" and isinstance(module, (nn.Linear, nn.QuantizedLinear))
    ]
    return heads[0] if len(heads) == 1 else None
