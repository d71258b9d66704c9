"""The drafter before training: an earlier drafter, or a new one.

A new drafter's head starts as the target's own head, projected on its leading singular directions
if the drafter's is narrower; the residual blocks start as the identity. The projection to the head
starts random. Initialised such that the target's state reaches the head as in the target, the
drafter would first predict the root, which is known, and unlearning that took longer than learning
from random weights.

Axes: V vocabulary, H hidden size, D exit_dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.quantization import quantization_of
from mlx_redrafter.proposers.redrafter import load as load_drafter
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.target_facts import check_sizes
from mlx_redrafter.target.target import FINAL, Target
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.target_size import TargetSize
from mlx_redrafter.training.training_options import NetworkOptions

DEFAULT_EXIT_DIM, DEFAULT_BLOCKS = 1024, 2
# Columns of the head matrix computed at once.
CHUNK_SIZE = 1024


def choose_drafter_config(
    target: Target | TargetSize, options: NetworkOptions, layers: tuple[int, ...] | None = None
) -> DrafterConfig:
    """Choose the shape of a new drafter for this target, that reads these layers."""
    default = min(DEFAULT_EXIT_DIM, 2 * target.hidden_size)
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        exit_dim=options.exit_dim or default,
        num_draft_layers=DEFAULT_BLOCKS if options.num_layers is None else options.num_layers,
        rnn=True,
        draft_vocab_size=options.draft_vocab,
        captured_layers=layers,
    )


def load_earlier_drafter(path_or_repo: str, target: Target, vocab_size: int) -> Drafter:
    """Load a drafter to continue training, in float32.

    Args:
        path_or_repo: Folder or hub repository of the drafter.
        target: The model to train the drafter for.
        vocab_size: Vocabulary size of the target's tokenizer.

    Raises:
        ConfigError: The drafter's weights are quantised.
        RedrafterError: The drafter cannot be loaded, or does not fit the target.
    """
    drafter = load_drafter(path_or_repo)
    if quantization_of(drafter) is not None:
        raise ConfigError(
            f"expected floating-point weights to train, found the drafter {path_or_repo}, which is "
            "quantised; start from the drafter it was made from"
        )
    check_sizes(drafter.config, target.hidden_size, target.vocab_size, vocab_size)
    drafter.set_dtype(mx.float32)
    mx.eval(drafter.parameters())
    return drafter


def select_frequent_tokens(
    sequences: Iterable[TokenSequence], always: Iterable[int], count: int, vocab_size: int
) -> NDArray[np.int32]:
    """Select the tokens of a reduced head: those of ``always``, then the most frequent.

    Returns:
        Token ids, ascending, int32, shape (count,).

    Raises:
        ConfigError: ``count`` exceeds ``vocab_size``.
    """
    if count > vocab_size:
        raise ConfigError(f"draft_vocab must be at most the model's {vocab_size}, got {count}")
    frequency = np.zeros(vocab_size, np.int64)
    for sequence in sequences:
        frequency += np.bincount(sequence.tokens, minlength=vocab_size)
    frequency[[token for token in always if token < vocab_size]] = np.iinfo(np.int64).max
    # Of equally frequent tokens the lowest: tokenizers number them by frequency.
    return np.sort(np.argsort(-frequency, kind="stable")[:count]).astype(np.int32)


def initialise_drafter(
    config: DrafterConfig,
    head: mx.array | None,
    seed: int,
    token_ids: NDArray[np.int32] | None = None,
) -> Drafter:
    """Create a drafter in float32 with the initial weights of a training run.

    Seeds MLX's global random state.

    Args:
        config: The drafter's shape.
        head: The target's head as a matrix, shape (V, H), or None for a random head.
        seed: Random seed for the weights.
        token_ids: Token id of each row of a reduced head, ascending, int32; None for a full head.
    """
    mx.random.seed(seed)
    drafter = Drafter(config)
    start_drafter(drafter, head, token_ids)
    mx.eval(drafter.parameters())
    return drafter


def start_drafter(
    drafter: Drafter, head: mx.array | None, token_ids: NDArray[np.int32] | None
) -> None:
    """Set what does not begin with random weights; see `initialise_drafter`."""
    if token_ids is not None:
        drafter.token_ids = mx.array(token_ids)
        head = None if head is None else head[drafter.token_ids]
    for block in drafter.lm_head[:-1]:
        block.linear.weight = mx.zeros_like(block.linear.weight)
        block.linear.bias = mx.zeros_like(block.linear.bias)
    if head is not None:
        _start_from_head(drafter, np.array(head.astype(mx.float32)))
    layers = drafter.config.captured_layers
    if layers is not None:  # at first the last hidden state alone
        parts = [(layer == FINAL) * mx.eye(drafter.config.hidden_size) for layer in layers]
        drafter.fusion.weight = mx.concatenate(parts, axis=1)


def _start_from_head(drafter: Drafter, head: NDArray[np.float32]) -> None:
    hidden, width = drafter.config.hidden_size, drafter.config.exit_dim
    last = drafter.lm_head[-1]
    weight = np.array(last.weight)
    if width < hidden:
        # The nearest matrix of rank D: the head in the basis of its leading right singular vectors,
        # which the small Gram matrix gives even if V is large.
        _, vectors = np.linalg.eigh(head.T @ head)
        basis = vectors[:, ::-1][:, :width]  # (H, D)
        weight = head @ basis
    else:
        basis = np.eye(hidden, width, dtype=np.float32)
        weight[:, :hidden] = head
    last.weight = mx.array(weight.astype(np.float32))


def compute_head_matrix(target: Target) -> mx.array | None:
    """Compute the matrix W of ``logits = W hidden``; waits for the device.

    Returns:
        The matrix in float32, dequantised if need be, shape (V, H), or None if the model has no
        linear head.
    """
    apply = _find_head(target.model)
    if apply is None:
        apply = _as_linear(target)
    if apply is None:
        return None
    identity = mx.eye(target.hidden_size).astype(_float_dtype(target))
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


def _as_linear(target: Target) -> Any:
    embedding = target.embedding
    return getattr(embedding, "as_linear", None)


def _float_dtype(target: Target) -> mx.Dtype:
    return target.embed(mx.zeros((1,), dtype=mx.int32)).dtype
