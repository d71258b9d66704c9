"""Sizes of a target, as far as training a drafter for it depends on them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_reduce

from mlx_redrafter.target.target import Target


@dataclass(frozen=True)
class TargetSize:
    """Sizes of a target.

    Attributes:
        hidden_size: Size of a hidden state, H.
        vocab_size: Number of rows of the input embedding, V.
        weight_bytes: Size of all weights, in bytes.
        float_bytes: Size of an element of a hidden state, in bytes.
    """

    hidden_size: int
    vocab_size: int
    weight_bytes: int
    float_bytes: int = 2

    @classmethod
    def of(cls, target: Target) -> TargetSize:
        """The sizes of a loaded target."""
        return cls(
            target.hidden_size,
            target.vocab_size,
            tree_reduce(lambda total, value: total + value.nbytes, target.model.parameters(), 0),
            target.embed(mx.zeros((1,), dtype=mx.int32)).dtype.size,
        )
