"""Comparing token sequences exactly, with the two best scores at the first difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step

Scored = tuple[int, mx.array]


def stock_tokens(
    model: nn.Module, prompt: Sequence[int], max_tokens: int, **options: Any
) -> list[Scored]:
    """Tokens of stock ``mlx_lm.generate_step`` with their log-probabilities."""
    # Despite its annotation it yields numbers.
    steps: Any = generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens, **options)
    return list(steps)


def ids(scored: Iterable[Scored]) -> list[int]:
    """The tokens alone."""
    return [token for token, _ in scored]


def assert_same_tokens(expected: Sequence[Scored], found: Sequence[int], what: object = "") -> None:
    """Fail at the first token that differs, and say how close the two best were there."""
    for position, ((token, log_probs), other) in enumerate(zip(expected, found, strict=False)):
        if token != other:
            row = np.array(log_probs.astype(mx.float32))
            first, second = (int(i) for i in np.argsort(-row)[:2])
            pytest.fail(
                f"{what}: token {position} is {other}, expected {token}; the best are "
                f"{first} ({row[first]:.7f}) and {second} ({row[second]:.7f})"
            )
    assert len(found) == len(expected), f"{what}: {len(found)} tokens, expected {len(expected)}"
