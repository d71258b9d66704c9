"""Batches of positions in an order that depends on the seed alone.

Every position stands for itself, since the drafter's state starts anew at each: positions of some
shards are shuffled together. A run can begin anywhere in the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.errors import DataError
from mlx_redrafter.training.loss import IMPOSSIBLE, Batch
from mlx_redrafter.training.options import Recipe
from mlx_redrafter.training.teacher_cache import Part, Shard, TeacherCache, windows

# Cached arrays in memory at one time; shards that fit are shuffled together.
GROUP_BYTES = 2**29


class BatchOptions(NamedTuple):
    """How batches are made.

    Attributes:
        recipe: Which tokens are the drafts.
        beam_length: L.
        batch_tokens: Positions per batch; the last one of a group is filled up with idle ones.
        seed: Of the order.
    """

    recipe: Recipe
    beam_length: int
    batch_tokens: int
    seed: int


class HeadRows:
    """Which row of the head stands for a token, where the head has rows for some tokens only.

    Args:
        token_ids: Tokens of the rows, int32, or None for a head with a row for every token.
        vocab_size: Tokens of the target.
    """

    def __init__(self, token_ids: NDArray[np.int32] | None, vocab_size: int):
        self._rows: mx.array | None = None
        if token_ids is not None:
            rows = np.full(vocab_size, -1, np.int32)
            rows[token_ids] = np.arange(len(token_ids))
            self._rows = mx.array(rows)

    def of(self, tokens: mx.array) -> mx.array:
        """Rows, int32, of the same shape; -1 where there is none."""
        return tokens if self._rows is None else self._rows[tokens]

    def distributions(
        self, top_ids: mx.array, log_probs: mx.array, tail: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The same distributions over rows; tokens without a row join the tail."""
        if self._rows is None:
            return top_ids, log_probs, tail
        rows = self._rows[top_ids]
        lost = mx.sum(mx.where(rows < 0, mx.exp(log_probs), 0.0), axis=-1)
        return mx.maximum(rows, 0), mx.where(rows < 0, IMPOSSIBLE, log_probs), tail + lost


class Place(NamedTuple):
    """Where a step is in the order: pass over the data, which group of it, which batch of that."""

    epoch: int
    group: int
    batch: int


@dataclass(frozen=True)
class Group:
    """Shards in memory.

    Attributes:
        shard: All of them as one.
        positions: Positions with at least one step that counts, int64, shape (p,).
        steps: Which steps count, bool, shape (n, L - 1).
    """

    shard: Shard
    positions: NDArray[np.int64]
    steps: NDArray[np.bool_]


class BatchOrder:
    """All batches of all epochs.

    Args:
        cache: Filled.
        part: Which shards.
        options: How.
        rows: Which rows the drafter's head has; a row for every token by default.

    Raises:
        DataError: No position has anything to learn from.
    """

    def __init__(
        self,
        cache: TeacherCache,
        part: Part,
        options: BatchOptions,
        rows: HeadRows | None = None,
    ):
        self.cache = cache
        self.rows = rows or HeadRows(None, 0)
        self.part: Part = part
        self.options = options
        self.groups, self.counts = self._survey()
        if not self.groups:
            raise DataError(
                f"expected texts of more than {options.beam_length} tokens to train on, found "
                "none; give longer or more texts"
            )
        self._group: tuple[int, Group] | None = None

    @property
    def num_positions(self) -> int:
        """Positions per epoch."""
        return sum(self.counts)

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch."""
        return sum(map(self._num_batches, self.counts))

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0 on."""
        place = self._place(step)
        group = self._load(place.group)
        rng = np.random.default_rng([self.options.seed, place.epoch, place.group])
        order = rng.permutation(group.positions)
        size = self.options.batch_tokens
        chosen = order[place.batch * size : (place.batch + 1) * size]
        return gather(group, chosen, size, self.options.beam_length, self.rows)

    def _place(self, step: int) -> Place:
        epoch, left = divmod(step, self.steps_per_epoch)
        rng = np.random.default_rng([self.options.seed, epoch])
        for group in rng.permutation(len(self.groups)):
            if left < self._num_batches(self.counts[group]):
                return Place(epoch, int(group), left)
            left -= self._num_batches(self.counts[group])
        raise AssertionError("a step beyond the epoch")

    def _num_batches(self, count: int) -> int:
        return -(-count // self.options.batch_tokens)

    def _survey(self) -> tuple[list[list[int]], list[int]]:
        """Numbers of the shards of each group, and its positions."""
        groups: list[list[int]] = []
        counts: list[int] = []
        room = 0
        # What the target wrote comes first in the cache, what others wrote after it: a group of
        # neighbours would be one kind of text, and the drafter would forget the other.
        rng = np.random.default_rng(self.options.seed)
        for number in rng.permutation(self.cache.num_shards(self.part)).tolist():
            shard = self.cache.load(self.part, number)
            count = int(self._steps(shard).any(axis=1).sum())
            if count == 0:
                continue
            size = sum(array.nbytes for array in shard.arrays().values())
            if not groups or size > room:
                groups.append([])
                counts.append(0)
                room = GROUP_BYTES
            groups[-1].append(number)
            counts[-1] += count
            room -= size
        return groups, counts

    def _steps(self, shard: Shard) -> NDArray[np.bool_]:
        length = self.options.beam_length
        tokens, is_trained, starts = map(np.array, (shard.tokens, shard.is_trained, shard.starts))
        steps = windows(tokens, is_trained, starts, length)
        if self.options.recipe == "rollouts":
            # A rollout is complete wherever it begins.
            trained = np.append(np.array(shard.is_trained)[1:], False)
            trained[np.array(shard.starts)[1:] - 1] = False
            steps = np.repeat(trained[:, None], length - 1, axis=1)
        return steps

    def _load(self, number: int) -> Group:
        if self._group is None or self._group[0] != number:
            self._group = None  # before the next one takes its memory
            length = self.options.beam_length if self.options.recipe == "rollouts" else None
            shards = [self.cache.load(self.part, n, length) for n in self.groups[number]]
            steps = np.concatenate([self._steps(shard) for shard in shards])
            group = Group(concatenate(shards), np.flatnonzero(steps.any(axis=1)), steps)
            self._group = (number, group)
        return self._group[1]


def concatenate(shards: list[Shard]) -> Shard:
    """Several shards as one."""
    if len(shards) == 1:
        return shards[0]
    offsets = np.cumsum([0, *(shard.tokens.shape[0] for shard in shards)])
    starts = [shard.starts[:-1] + int(n) for shard, n in zip(shards, offsets, strict=False)]
    joined = {
        name: mx.concatenate([getattr(shard, name) for shard in shards])
        for name in shards[0].arrays()
        if name != "starts"
    }
    if all(shard.rollouts is not None for shard in shards):
        joined["rollouts"] = mx.concatenate([s.rollouts for s in shards if s.rollouts is not None])
    end = mx.array([int(offsets[-1])], dtype=mx.int32)
    shard = Shard(starts=mx.concatenate([*starts, end]), **joined)
    mx.eval(list(shard.arrays().values()))
    return shard


def gather(
    group: Group, positions: NDArray[np.int64], size: int, length: int, rows: HeadRows
) -> Batch:
    """The batch of some positions, filled up to ``size`` with ones that do not count."""
    shard, last = group.shard, len(group.steps) - 1
    weights = np.zeros((size, length - 1), np.float32)
    weights[: len(positions)] = group.steps[positions]
    padded = np.zeros(size, np.int64)
    padded[: len(positions)] = positions
    here = mx.array(padded.astype(np.int32))
    if shard.rollouts is None:
        ahead = np.minimum(padded[:, None] + np.arange(1, length + 1), last).astype(np.int32)
        tokens = shard.tokens[mx.array(ahead)]
    else:
        tokens = shard.rollouts[here]
    # The distribution at the root and at each draft but the last: P_{t+1} to P_{t+S}.
    seen = np.minimum(padded[:, None] + np.arange(1, length), last).astype(np.int32)
    where = mx.array(seen)
    top_ids, log_probs, tail = rows.distributions(
        shard.top_ids[where], shard.top_log_probs[where].astype(mx.float32), shard.tail[where]
    )
    return Batch(
        hidden=shard.hidden[here],
        tokens=tokens,
        labels=rows.of(tokens[:, 1:]),
        weights=mx.array(weights),
        top_ids=top_ids,
        top_log_probs=log_probs,
        tail=tail,
    )
