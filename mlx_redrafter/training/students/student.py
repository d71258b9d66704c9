"""What training asks of every kind of drafter.

Axes: B positions, S unroll steps, H hidden size, V rows of the head.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.training.loss import Batch
from mlx_redrafter.training.teacher_cache import Shard


class Student(ABC):
    """A drafter of some kind, while it learns from its target.

    Args:
        network: Its network, in float32.

    Attributes:
        network: Weights and sizes.
        name: The kind in words, as a phrase with an article if it takes one.
        reads_context: Whether it attends to what it read before, so that its examples are
            stretches of text, or drafts from one state of the target.
        layers: Layers of the target whose inputs it reads, () for the last hidden states.
    """

    name: str
    reads_context = False
    layers: Sequence[int] = ()

    def __init__(self, network: nn.Module):
        self.network: Any = network

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """Default of the peak learning rate."""

    @property
    def summary(self) -> str:
        """Sizes, and calibration where there is one, in words."""
        config = self.network.config
        text: str = config.summary
        if hasattr(config, "inverse_temperature"):
            scale, share = config.inverse_temperature, config.coupling_weight
            text += f"; score scale {scale:.2f}, noise share {share:g}"
        return text

    @property
    def head_rows(self) -> int:
        """Number of tokens that it can propose, V."""
        rows: int = self.network.config.head_rows
        return rows

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the target."""
        size: int = self.network.config.vocab_size
        return size

    @property
    def row_ids(self) -> mx.array | None:
        """Token ids of the rows of a reduced head, integer, shape (V,); None for a full one."""
        return self.network.get("token_ids")

    @abstractmethod
    def new_network(self) -> nn.Module:
        """A network of the same sizes; its random weights are not computed."""

    @abstractmethod
    def start(self, head: mx.array | None, token_ids: NDArray[np.int32] | None) -> None:
        """Set what does not begin with random weights.

        Args:
            head: The target's head as a matrix, shape (all tokens, H), None if it is not one.
            token_ids: Token id of each row of a reduced head, ascending, int32; None for a full
                one.
        """

    @abstractmethod
    def logits(self, network: Any, batch: Batch) -> mx.array:
        """Logits of a network of this kind after the root, and after each draft but the last.

        Returns:
            Float32, shape (B, S, V); arbitrary where the weight is 0.
        """

    @abstractmethod
    def leave_target(self) -> None:
        """Keep no more of the target than training needs; waits for the device."""

    @abstractmethod
    def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write the network.

        Args:
            folder: Destination.
            extra: Further keys for ``config.json``.
        """

    @abstractmethod
    def calibrate(self, texts: Sequence[Shard]) -> None:
        """Set what says how drafts are ranked, from texts that the target generated."""

    @abstractmethod
    def plans(self, length: int) -> dict[str, DraftPlan]:
        """Plans that the finished drafter is measured with, by name, of at most L tokens a beam.

        The first is a chain.
        """

    @abstractmethod
    def count_accepted(
        self, shard: Shard, roots: NDArray[np.int64], plan: DraftPlan, temp: float
    ) -> NDArray[np.int64]:
        """Count the drafts accepted in a step from each of the given roots.

        Args:
            shard: Texts.
            roots: Indices of the root tokens in the shard, those of a text consecutive, none the
                first of a text, shape (p,).
            plan: One of `plans`.
            temp: Sampling temperature of the texts; 0 drafts without noise.

        Returns:
            Number of accepted drafts of each root, int64, shape (p,).
        """

    def holding(self, network: nn.Module) -> Self:
        """The same kind of drafter with another network of the same sizes."""
        other = copy.copy(self)
        other.network = network
        return other

    def with_weights(self, weights: Mapping[str, mx.array]) -> Self:
        """The same drafter with other weights, independent of it; others are shared."""
        network = self.new_network()
        network.update(self.network.parameters())
        network.load_weights(list(weights.items()), strict=False)
        network.eval()
        return self.holding(network)

    def in_dtype(self, dtype: mx.Dtype) -> Self:
        """The same drafter with weights of another dtype."""
        other = self.with_weights({})
        other.network.set_dtype(dtype)
        return other


def initialise(
    student: Student, head: mx.array | None, seed: int, token_ids: NDArray[np.int32] | None = None
) -> None:
    """Give a student the initial weights of a training run; seeds MLX's global random state.

    Args:
        student: A student whose network is not trained.
        head: As in `Student.start`.
        seed: Random seed for the weights.
        token_ids: As in `Student.start`.
    """
    mx.random.seed(seed)
    student.network = student.new_network()
    student.start(head, token_ids)
    mx.eval(student.network.parameters())
