"""The drafter before training: an earlier one, or a new one.

A new one's head starts as the target's own, projected on the directions that matter most to it when
it is narrower; its residual blocks start as the identity. The projection to the head starts random:
made so that the target's state reaches the head as in the target, it would begin with predicting
the root, which is known, and that took longer to unlearn than random weights take to learn.

Axes: V vocabulary, H hidden size, D exit_dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.config import DrafterConfig
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.generation import check_fit
from mlx_redrafter.proposers.redrafter.checkpoint import load_drafter
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.options import NetworkOptions

DEFAULT_EXIT_DIM = 1024
# Rows of the head computed at once.
ROWS = 1024


def drafter_config(target: Target, options: NetworkOptions) -> DrafterConfig:
    """The shape of a drafter for this target."""
    default = min(DEFAULT_EXIT_DIM, 2 * target.hidden_size)
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        exit_dim=options.exit_dim or default,
        num_draft_layers=options.num_layers,
        rnn=True,
        draft_vocab_size=options.draft_vocab,
    )


def earlier_drafter(path_or_repo: str, target: Target, vocab_size: int) -> Drafter:
    """A drafter to go on from, in float32.

    Args:
        path_or_repo: As for `load_drafter`.
        target: The model to train it for.
        vocab_size: Of that model's tokenizer.

    Raises:
        ConfigError: Its weights are quantised.
        RedrafterError: It cannot be loaded, or does not fit the target.
    """
    drafter = load_drafter(path_or_repo)
    if drafter.quantization is not None:
        raise ConfigError(
            f"the drafter {path_or_repo} is quantised, and rounded weights cannot be trained; "
            "start from the one that it was made of"
        )
    check_fit(drafter, target, vocab_size)
    drafter.set_dtype(mx.float32)
    mx.eval(drafter.parameters())
    return drafter


def frequent_tokens(
    sequences: Iterable[TokenSequence], always: Iterable[int], count: int, vocab_size: int
) -> NDArray[np.int32]:
    """The tokens that a reduced head proposes, ascending: some always, then the most frequent.

    Raises:
        ConfigError: There are not that many tokens.
    """
    if count > vocab_size:
        raise ConfigError(f"draft_vocab must be at most the model's {vocab_size}, got {count}")
    frequency = np.zeros(vocab_size, np.int64)
    for sequence in sequences:
        frequency += np.bincount(sequence.tokens, minlength=vocab_size)
    frequency[[token for token in always if token < vocab_size]] = np.iinfo(np.int64).max
    # Of equally frequent tokens the lowest: tokenizers number them by frequency.
    return np.sort(np.argsort(-frequency, kind="stable")[:count]).astype(np.int32)


def initial_drafter(
    config: DrafterConfig,
    head: mx.array | None,
    seed: int,
    token_ids: NDArray[np.int32] | None = None,
) -> Drafter:
    """A drafter in float32 with the weights training starts from.

    Seeds MLX's global random state.

    Args:
        config: Its shape.
        head: The target's head as a matrix, shape (V, H), or None to start from noise.
        seed: Of the random weights.
        token_ids: Tokens of the rows of a reduced head, in order.
    """
    mx.random.seed(seed)
    drafter = Drafter(config)
    if token_ids is not None:
        drafter.token_ids = mx.array(token_ids)
        head = None if head is None else head[drafter.token_ids]
    for block in drafter.lm_head[:-1]:
        block.linear.weight = mx.zeros_like(block.linear.weight)
        block.linear.bias = mx.zeros_like(block.linear.bias)
    if head is not None:
        _start_from_head(drafter, np.array(head.astype(mx.float32)))
    mx.eval(drafter.parameters())
    return drafter


def _start_from_head(drafter: Drafter, head: NDArray[np.float32]) -> None:
    hidden, width = drafter.config.hidden_size, drafter.config.exit_dim
    last = drafter.lm_head[-1]
    weight = np.array(last.weight)
    if width < hidden:
        # The rank-D matrix nearest to the head: its right singular vectors, from the small Gram
        # matrix since V may be large.
        _, vectors = np.linalg.eigh(head.T @ head)
        basis = vectors[:, ::-1][:, :width]  # (H, D)
        weight = head @ basis
    else:
        basis = np.eye(hidden, width, dtype=np.float32)
        weight[:, :hidden] = head
    last.weight = mx.array(weight.astype(np.float32))


def head_matrix(target: Target) -> mx.array | None:
    """The matrix W with ``logits = W hidden``, or None where the model has no plain head.

    Returns:
        float32, shape (V, H), whatever the head is stored as; waits for the device.
    """
    apply = _find_head(target.model)
    if apply is None:
        apply = _as_linear(target)
    if apply is None:
        return None
    identity = mx.eye(target.hidden_size).astype(_float_dtype(target))
    columns = []
    for start in range(0, target.hidden_size, ROWS):
        part = apply(identity[start : start + ROWS])
        mx.eval(part)
        columns.append(part)
    matrix = mx.concatenate(columns).T.astype(mx.float32)
    return matrix if matrix.shape == (target.vocab_size, target.hidden_size) else None


def _find_head(model: Any) -> Any:
    """The module ``lm_head`` of the model or of the text model inside it."""
    heads = [
        module
        for name, module in model.named_modules()
        if name.split(".")[-1] == "lm_head" and isinstance(module, (nn.Linear, nn.QuantizedLinear))
    ]
    return heads[0] if len(heads) == 1 else None


def _as_linear(target: Target) -> Any:
    embedding = target.embedding
    return getattr(embedding, "as_linear", None)


def _float_dtype(target: Target) -> mx.Dtype:
    return target.embed(mx.zeros((1,), dtype=mx.int32)).dtype
