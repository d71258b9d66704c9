"""The target's head, and the tokens of a reduced head, which a new drafter starts from.

Axes: V vocabulary, H hidden size.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.errors import ConfigError, UnsupportedTargetError
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training_options import HEADS, NetworkOptions

# Number of columns of the head matrix computed at once.
CHUNK_SIZE = 1024
# A new drafter proposes the V / 8 most frequent tokens of the model, if V is large.
SLICE_PART = 8
# Minimum number of these tokens; a vocabulary of less than twice as many is used whole.
LEAST_SLICE = 8192


def find_special_tokens(tokenizer: Any, vocab_size: int) -> set[int]:
    """Find the tokens that a reduced head always has: stop tokens, and those named as special."""
    special = {*tokenizer.eos_token_ids, *getattr(tokenizer, "all_special_ids", ())}
    return {token for token in special if token < vocab_size}


def choose_slice(options: NetworkOptions, vocab_size: int, num_special: int) -> NetworkOptions:
    """Choose the number of tokens that a new drafter can propose; None for all.

    It must be at most V, and leave room for other tokens than the special ones.
    """
    count = options.draft_vocab
    if "draft_vocab" not in HEADS[options.head] or options.start_from is not None:
        return options
    if count is None:
        count = max(LEAST_SLICE, vocab_size // SLICE_PART)
        count = count if 2 * count <= vocab_size else vocab_size
    if not num_special < count <= vocab_size:
        raise ConfigError(
            f"draft_vocab must be from {num_special + 1}, one more than the model's special "
            f"tokens, to its {vocab_size} tokens, got {count}"
        )
    return replace(options, draft_vocab=count if count < vocab_size else None)


def select_frequent_tokens(
    sequences: Iterable[TokenSequence], always: Iterable[int], count: int, vocab_size: int
) -> NDArray[np.int32]:
    """Select the ids of a reduced head, ascending.

    ``always`` comes first, then the tokens trained on most often, then the most frequent others.
    """
    trained, given = np.zeros((2, vocab_size), np.int64)
    for sequence in sequences:
        trained += np.bincount(sequence.tokens[sequence.is_trained], minlength=vocab_size)
        given += np.bincount(sequence.tokens, minlength=vocab_size)
    frequency = trained + given / (1 + given.sum())
    frequency[list(always)] = np.inf
    # A stable sort prefers the lower of equally frequent tokens: tokenizers number by frequency.
    return np.sort(np.argsort(-frequency, kind="stable")[:count]).astype(np.int32)


def compute_head_matrix(target: Target) -> mx.array | None:
    """Compute the matrix W of ``logits = W hidden``, float32, shape (V, H); blocks until evaluated.

    None if the model has no linear head.
    """
    identity, columns = mx.eye(target.hidden_size), []
    try:
        bias = target.modules.project(mx.zeros((1, target.hidden_size)))  # of few models
        for start in range(0, target.hidden_size, CHUNK_SIZE):
            columns.append(target.modules.project(identity[start : start + CHUNK_SIZE]) - bias)
            mx.eval(columns[-1])
    except UnsupportedTargetError:
        return None
    matrix = mx.concatenate(columns).T.astype(mx.float32)
    return matrix if matrix.shape == (target.vocab_size, target.hidden_size) else None
