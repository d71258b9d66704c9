"""Students that chains measure, by logits along the text, without drafting.

A draft of a chain is accepted if this draft and all before it are the tokens of the text. The
drafter then made it after the tokens of the text. So the logits that training unrolls along the
text are those of decoding.

Axes: p roots, B positions, S unroll steps, V rows of the head, L beam length.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.training.batches import HeadRows, ShardGroup, gather
from mlx_redrafter.training.generated_texts import draw_noise, read_following
from mlx_redrafter.training.loss import TrainingBatch
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.teacher_cache import Shard


class ChainStudent(Student):
    """A student that computes its logits level by level."""

    @property
    @abstractmethod
    def coupling_weight(self) -> float:
        """Weight of the target's Gumbel noise in the ranking of drafts, 0 to 1."""

    @abstractmethod
    def levels(self, network: Any, batch: TrainingBatch) -> Iterator[mx.array]:
        """Compute the logits of each unroll step, float32, shape (B, V); see `Student.logits`."""

    def logits(self, network: Any, batch: TrainingBatch) -> mx.array:
        return mx.stack(list(self.levels(network, batch)), axis=1)

    def plans(self, length: int) -> dict[str, DraftPlan]:
        return {f"chain of {length - 1}": DraftPlan.of(1, length)}

    def count_accepted(
        self, shard: Shard, roots: NDArray[np.int64], plan: DraftPlan, temp: float
    ) -> NDArray[np.int64]:
        ends = np.array(shard.starts)[1:-1]
        texts = [text for text in np.split(roots, np.searchsorted(roots, ends)) if len(text)]
        length = plan.shape.length
        return np.concatenate([self._count_text(shard, text, length, temp) for text in texts])

    def _count_text(
        self, shard: Shard, roots: NDArray[np.int64], length: int, temp: float
    ) -> NDArray[np.int64]:
        starts = np.array(shard.starts)
        # A drafter that attends to the context needs all of it.
        begin = starts[np.searchsorted(starts, roots[0], side="right") - 1]
        first = int(begin) if self.reads_context else int(roots[0]) - 1
        positions = np.arange(first, int(roots[-1]))
        group = ShardGroup(shard, roots, np.ones((shard.tokens.shape[0], length - 1), np.bool_))
        batch = gather(group, positions, len(positions), length, HeadRows(None, 0))
        following = read_following(shard, roots, length)
        is_right = np.ones(len(roots), np.bool_)
        count = np.zeros(len(roots), np.int64)
        for depth, logits in enumerate(self.levels(self.network, batch)):
            noise = draw_noise(shard, roots + depth, self.vocab_size, temp) if temp else None
            is_right &= self._choose(logits[-len(roots) :], noise, temp) == following[:, depth]
            count += is_right
        return count

    def _choose(self, logits: mx.array, noise: mx.array | None, temp: float) -> NDArray[np.int32]:
        """Choose the drafts of one level with Gumbel noise (p, all tokens); ids, shape (p,)."""
        ids = self.row_ids
        if noise is not None:
            columns = noise[:, : logits.shape[-1]] if ids is None else noise[:, ids]
            logits = logits / temp + self.coupling_weight * columns
        rows = mx.argmax(logits, axis=-1)
        return np.array((rows if ids is None else ids[rows]).astype(mx.int32))
