"""Students that are measured with chains, from logits along the text: no draft needs to be made.

A chain's draft is accepted if it and all before it are the tokens of the text, and then it was made
after the tokens of the text. So the logits that training unrolls along the text are those that
decoding would see.

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
from mlx_redrafter.training.batches import Group, HeadRows, gather
from mlx_redrafter.training.hindsight import draw_noise, read_following
from mlx_redrafter.training.loss import Batch
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.teacher_cache import Shard


class ChainStudent(Student):
    """A student whose logits are computed level by level."""

    @property
    @abstractmethod
    def coupling_weight(self) -> float:
        """Weight of the target's noise, 0 to 1, with which it ranks drafts."""

    @abstractmethod
    def levels(self, network: Any, batch: Batch) -> Iterator[mx.array]:
        """See `Student.logits`, for each unroll step float32 of shape (B, V)."""

    def logits(self, network: Any, batch: Batch) -> mx.array:
        """See `Student.logits`."""
        return mx.stack(list(self.levels(network, batch)), axis=1)

    def plans(self, length: int) -> dict[str, DraftPlan]:
        """See `Student.plans`."""
        return {f"chain of {length - 1}": DraftPlan.of(1, length)}

    def count_accepted(
        self, shard: Shard, roots: NDArray[np.int64], plan: DraftPlan, temp: float
    ) -> NDArray[np.int64]:
        """See `Student.count_accepted`."""
        ends = np.array(shard.starts)[1:-1]
        texts = [text for text in np.split(roots, np.searchsorted(roots, ends)) if len(text)]
        length = plan.shape.length
        return np.concatenate([self._count_text(shard, text, length, temp) for text in texts])

    def _count_text(
        self, shard: Shard, roots: NDArray[np.int64], length: int, temp: float
    ) -> NDArray[np.int64]:
        starts = np.array(shard.starts)
        # What attends to the text before needs all of it.
        begin = starts[np.searchsorted(starts, roots[0], side="right") - 1]
        first = int(begin) if self.reads_context else int(roots[0]) - 1
        positions = np.arange(first, int(roots[-1]))
        group = Group(shard, roots, np.ones((shard.tokens.shape[0], length - 1), np.bool_))
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
        """First ranks of one level with noise (p, all tokens), token ids, shape (p,)."""
        ids = self.row_ids
        if noise is not None:
            columns = noise[:, : logits.shape[-1]] if ids is None else noise[:, ids]
            logits = logits / temp + self.coupling_weight * columns
        rows = mx.argmax(logits, axis=-1)
        return np.array((rows if ids is None else ids[rows]).astype(mx.int32))
