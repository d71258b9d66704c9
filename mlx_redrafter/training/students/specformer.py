"""SpecFormer as a student.

Axes: n positions of a stretch of text, S slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.proposers.checkpoint import save_drafter
from mlx_redrafter.proposers.specformer.network import SpecFormer
from mlx_redrafter.training.loss import Batch
from mlx_redrafter.training.students.context import KvStudent, Rows, level_masks


class SpecFormerStudent(KvStudent):
    """A SpecFormer, whose slots learn side by side."""

    name = "a SpecFormer"
    network: SpecFormer

    def new_network(self) -> SpecFormer:
        """See `Student.new_network`."""
        return SpecFormer(self.network.config)

    def start(self, head: mx.array | None, token_ids: NDArray[np.int32] | None) -> None:
        """See `Student.start`; all begins with random weights."""

    def save(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """See `Student.save`."""
        save_drafter(self.network, folder, extra)

    def levels(self, network: SpecFormer, batch: Batch) -> Iterator[mx.array]:
        """See `ChainStudent.levels`; the positions are those of one stretch."""
        cache = Rows()
        cache.mask = next(level_masks(batch.sequences, 1))
        outputs = network(network.fuse(batch.states), mx.array([]), [cache])
        slots = network.slots(outputs, batch.tokens.shape[1] - 1)
        for slot in range(slots.shape[1]):
            logits = network.logits(slots[:, slot], self.target)[:, : self.head_rows]
            yield logits.astype(mx.float32)
