"""Batches of positions in an order that depends on the seed alone.

A drafter that starts from one state of the target has single positions as examples, and one that
attends to the context has stretches of consecutive positions. Examples of several shards are
shuffled together. A run can begin anywhere in the order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_redrafter.errors import DataError
from mlx_redrafter.training.loss import IMPOSSIBLE, TrainingBatch
from mlx_redrafter.training.teacher_cache import Shard, Split, TeacherCache, find_draftable_steps

# Maximum size of the shards that are in memory and shuffled together, in bytes.
GROUP_BYTES = 2**29


class BatchOptions(NamedTuple):
    """Options of `BatchOrder`.

    Attributes:
        beam_length: L, root included.
        batch_tokens: Number of positions per batch; positions of weight 0 fill a group's last one.
        seed: Random seed for the order.
        stretch: Number of consecutive positions of an example.
        layers: Layers of the target whose inputs the drafter reads, () for its last hidden states.
        share: Share of the positions that draft, drawn in every step.
    """

    beam_length: int
    batch_tokens: int
    seed: int
    stretch: int = 1
    layers: Sequence[int] = ()
    share: float = 1.0

    @property
    def batch_examples(self) -> int:
        return max(1, self.batch_tokens // self.stretch)

    @property
    def anchors(self) -> int:
        return max(1, round(self.share * self.stretch))

    @property
    def num_parts(self) -> int:
        """Number of parts of a batch of single positions, of which an epoch uses one."""
        return round(1 / self.share) if self.stretch == 1 else 1

    @property
    def batch_size(self) -> int:
        """Number of positions of a batch that the drafter reads."""
        return -(-self.batch_examples // self.num_parts) * self.stretch


# Joined shards, first positions of their examples, (p,), and unroll steps that count, (n, L - 1).
Group = tuple[Shard, NDArray[np.int64], NDArray[np.bool_]]


class BatchOrder:
    def __init__(
        self, cache: TeacherCache, split: Split, options: BatchOptions, rows: mx.array | None = None
    ):
        self.cache = cache
        self.rows = rows
        self.split: Split = split
        self.options = options
        self.groups, self.counts = self._survey()
        if not self.groups:
            raise DataError(
                f"expected texts of more than {options.beam_length} tokens to train on, found "
                "none; give longer or more texts"
            )
        self._group: tuple[int, Group] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return sum(map(self._num_batches, self.counts))

    def batch(self, step: int) -> TrainingBatch:
        """Collect the batch of a step; the first step is 0."""
        epoch, number, first = self._place(step)
        shard, examples, steps = self._load(number)
        options = self.options
        turn, part = divmod(epoch, options.num_parts)
        rng = np.random.default_rng([options.seed, turn, number])
        order = rng.permutation(examples)
        chosen = order[first : first + options.batch_examples][part :: options.num_parts]
        positions = chosen[:, None] + np.arange(options.stretch)
        anchors = self._draw_anchors(step, steps, positions)
        size, length = options.batch_size, options.beam_length
        return gather(shard, steps, positions.flatten(), size, length, self.rows, anchors)

    def _draw_anchors(
        self, step: int, steps: NDArray[np.bool_], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Draw positions of each example that draft, ascending, int64, shape (examples, anchors).

        Those with steps that count come first.
        """
        options, last = self.options, len(steps) - 1
        rng = np.random.default_rng([options.seed, step, 1])
        order = rng.random((options.batch_size // options.stretch, options.stretch))
        counts = steps[np.minimum(positions, last)].any(axis=-1) & (positions <= last)
        order[: len(positions)] += ~counts
        return np.sort(np.argsort(order, axis=1)[:, : options.anchors], axis=1)

    def _place(self, step: int) -> tuple[int, int, int]:
        """Find the epoch of a step, its group, and its first example in the group's order."""
        epoch, left = divmod(step, self.steps_per_epoch)
        rng = np.random.default_rng([self.options.seed, epoch])
        for group in rng.permutation(len(self.groups)):
            if left < self._num_batches(self.counts[group]):
                return epoch, int(group), left * self.options.batch_examples
            left -= self._num_batches(self.counts[group])
        raise AssertionError("a step beyond the epoch")

    def _num_batches(self, count: int) -> int:
        return -(-count // self.options.batch_examples)

    def _survey(self) -> tuple[list[list[int]], list[int]]:
        groups: list[list[int]] = []
        counts: list[int] = []
        room, stretch, length = 0, self.options.stretch, self.options.beam_length
        # The cache holds given texts first and self-generated texts after them. A group of
        # neighbours would hold one kind of text, and the drafter would forget the other.
        rng = np.random.default_rng(self.options.seed)
        for number in rng.permutation(self.cache.num_shards(self.split)).tolist():
            shard = self.cache.load(self.split, number, self.options.layers)
            count = int(find_draftable_steps(shard, length).any(axis=1).sum())
            if count == 0:
                continue
            size = sum(array.nbytes for array in vars(shard).values() if array is not None)
            if not groups or size > room:
                groups.append([])
                counts.append(0)
                room = GROUP_BYTES
            groups[-1].append(number)
            counts[-1] += count if stretch == 1 else shard.tokens.shape[0]
            room -= size
        return groups, [-(-count // stretch) for count in counts]

    def _load(self, number: int) -> Group:
        if self._group is None or self._group[0] != number:
            self._group = None  # free its memory before the next group is read
            layers, length = self.options.layers, self.options.beam_length
            shards = [self.cache.load(self.split, n, layers) for n in self.groups[number]]
            steps = np.concatenate([find_draftable_steps(shard, length) for shard in shards])
            self._group = number, (concatenate(shards), *divide(steps, self.options.stretch))
        return self._group[1]


def divide(steps: NDArray[np.bool_], stretch: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Find the first positions of examples of ``stretch`` positions, beyond which no step reaches.

    A single position is an example if one of its steps counts. Also return the steps that count.
    """
    if stretch == 1:
        return np.flatnonzero(steps.any(axis=1)), steps
    count, num_steps = steps.shape
    last = np.arange(count)[:, None] % stretch + np.arange(num_steps)
    return np.arange(0, count, stretch), steps & (last < stretch)


def concatenate(shards: list[Shard]) -> Shard:
    """Join several shards into one; blocks until MLX has evaluated it."""
    if len(shards) == 1:
        return shards[0]
    joined = {
        name: mx.concatenate([getattr(shard, name) for shard in shards])
        for name, array in vars(shards[0]).items()
        if array is not None
    }
    lengths = np.concatenate([np.diff(np.array(shard.starts)) for shard in shards])
    joined["starts"] = mx.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
    mx.eval(joined)
    return Shard(**joined)


def map_to_rows(
    rows: mx.array, log_probs: mx.array, tail: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Let the tokens of distributions whose row is -1 join the tail; return rows and the rest."""
    is_lost = rows < 0
    lost = mx.sum(mx.where(is_lost, mx.exp(log_probs), 0.0), axis=-1)
    return mx.maximum(rows, 0), mx.where(is_lost, IMPOSSIBLE, log_probs), tail + lost


def gather(
    shard: Shard,
    steps: NDArray[np.bool_],
    positions: NDArray[np.int64],
    size: int,
    length: int,
    rows: mx.array | None = None,
    anchors: NDArray[np.int64] | None = None,
) -> TrainingBatch:
    """Collect the batch of some positions.

    Positions of weight 0 fill it up to ``size``, and replace positions beyond the last. ``rows``
    are those of the drafter's head by token, int32, -1 for tokens without one; None if they are the
    token ids. ``anchors`` are the indices of the positions that draft in each example, shape
    (examples, anchors); by default all of one example.
    """
    if anchors is None:
        anchors = np.arange(size)[None]
    last = len(steps) - 1
    padded = np.pad(positions, (0, size - len(positions)), constant_values=last + 1)
    is_there = padded <= last
    padded = np.where(is_there, padded, 0)
    # The padding of a stretch counts as another sequence.
    sequences = np.searchsorted(np.array(shard.starts), padded, side="right")
    sequences = np.where(is_there, sequences, 0).astype(np.int32)
    here = mx.array(padded.astype(np.int32))
    following = shard.tokens[mx.minimum(here + 1, last)]
    begins = np.arange(0, size, size // len(anchors))[:, None]
    drafting = (begins + anchors).flatten()
    padded, is_there = padded[drafting], is_there[drafting]
    weights = np.where(is_there[:, None], steps[padded], False).astype(np.float32)
    ahead = np.minimum(padded[:, None] + np.arange(1, length + 1), last).astype(np.int32)
    tokens = shard.tokens[mx.array(ahead)]
    # The distribution at the root and at each draft but the last: P_{t+1} to P_{t+S}.
    where = mx.array(ahead[:, :-1])
    labels, top_ids, tail = tokens[:, 1:], shard.top_ids[where], shard.tail[where]
    log_probs = shard.top_log_probs[where].astype(mx.float32)
    if rows is not None:
        labels = rows[labels]
        top_ids, log_probs, tail = map_to_rows(rows[top_ids], log_probs, tail)
    return TrainingBatch(
        states=(shard.hidden if shard.states is None else shard.states)[here],
        sequences=mx.array(sequences),
        following=following,
        anchors=mx.array(anchors.flatten().astype(np.int32)),
        tokens=tokens,
        labels=labels,
        weights=mx.array(weights),
        top_ids=top_ids,
        top_log_probs=log_probs,
        tail=tail,
    )
