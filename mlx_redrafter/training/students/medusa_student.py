"""Medusa heads as a student."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import mlx.core as mx

from mlx_redrafter.proposers.medusa.network import Medusa, calibrate, rank_accuracies
from mlx_redrafter.training.generated_texts import iterate_texts
from mlx_redrafter.training.loss import TrainingBatch
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.teacher_cache import Shard


class MedusaStudent(Student):
    """Medusa heads. They begin as the target's head, after blocks that are the identity."""

    name = "Medusa heads (arXiv 2401.10774)"
    network: Medusa

    @property
    def learning_rate(self) -> float:
        """1e-3 for 1,000 wide states, inverse to their width."""
        return min(1.0 / self.network.config.hidden_size, 1.6e-2)

    def start_from_head(self, head: mx.array | None) -> None:
        for *blocks, output in self.network.heads:
            for block in blocks:
                block.linear.weight = mx.zeros_like(block.linear.weight)
                if self.network.config.bias:
                    block.linear.bias = mx.zeros_like(block.linear.bias)
            if head is not None:
                output.weight = mx.array(head)

    def levels(self, network: Medusa, batch: TrainingBatch) -> Iterator[mx.array]:
        for head in range(batch.tokens.shape[1] - 1):
            yield network.logits(batch.states, head).astype(mx.float32)

    def calibrate(self, texts: Iterable[Shard]) -> None:
        """Fit the scalars, and the acceptance rates by rank that choose the static tree."""
        network = self.network
        found = list(iterate_texts(texts))
        config = calibrate(network, found).applied(network.config)
        network.config = replace(config, rank_accuracies=rank_accuracies(network, found))
