"""The caches of several sequences in one buffer per layer, each sequence at its own offset.

Axes: B slots, N nodes of each slot's tree.

A slot holds one sequence: its committed K/V entries come first, the entries of its tree follow.
Sequences accept different paths, so nothing is padded or rolled. Each pass writes, at the places of
each sequence, the accepted entries that are not in place yet and the entries of the new tree, with
one update per buffer. No mask lets anything attend to an idle slot, nor to what another sequence
has left in a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_redrafter.target.caches.batch_layers import BATCH_LAYERS, BatchLayer, whole
from mlx_redrafter.target.caches.batch_pass import BatchPass
from mlx_redrafter.target.caches.cache_kinds import CompositeCache, describe
from mlx_redrafter.target.caches.recurrent import NewRows, RecurrentCache
from mlx_redrafter.target.caches.tree_cache import ForwardPass, TreeCache, flat
from mlx_redrafter.target.caches.tree_pass import History
from mlx_redrafter.target.few_shapes import bucket
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch

# Function that returns the number of tokens that a sequence keeps whatever happens; the maximum
# integer for one that keeps no states to go back to.
Floor = Callable[[], int]


class BatchCache:
    """The caches of several sequences. The first one determines the kinds of its layers.

    Attributes:
        layers: The model's ``cache=`` argument.
        step: The newest forward pass that `expect` has announced.
        lengths: Number of committed tokens of each slot; 0 for an idle one.
        capacity: Number of entries for which a slot has room if a layer attends to all tokens.
        max_nodes: Size of the largest trees so far.
    """

    def __init__(self, has_buckets: bool = False):
        self._has_buckets = has_buckets
        self.layers: list[Any] = []
        self.lengths: list[int] = []
        self.capacity = 0
        self.max_nodes = 1
        self.step: BatchPass | None = None
        # The caches of a single sequence by kind and size.
        self._kinds: list[str] = []
        self._rows: list[BatchLayer] = []
        self._states: list[RecurrentCache] = []
        self._history = History(0)
        # For each slot, the accepted nodes of the newest tree that are not in place, and the
        # position of the first of them.
        self._moves: list[tuple[Sequence[int], int]] = []
        # Functions that return the number of tokens that each sequence keeps whatever happens; None
        # for an idle slot.
        self._floors: list[Floor | None] = []
        # Position behind the last entry of each slot, of a tree or committed.
        self._ends: list[int] = []

    @property
    def num_slots(self) -> int:
        """Number of slots, B."""
        return len(self.lengths)

    def takes(self, own: TreeCache) -> bool:
        """Whether a slot can hold a sequence as it is, with layers like those of the others."""
        return own.may_move and (not any(self._floors) or self._kinds == _kinds(own))

    def expect(self, trees: TreeBatch) -> BatchPass:
        """Make the next forward pass one over these trees, one per slot."""
        self._take_over_states()
        num_rows = max(self.lengths) + trees.size
        if self._has_buckets:
            num_rows = bucket(num_rows)
        self._reserve(num_rows, trees.size)
        self._ends = [length + trees.size for length in self.lengths]
        self.step = BatchPass(self.lengths, trees, self._history, num_rows, self._moves)
        self._history.enter(self.step, [floor() if floor else 0 for floor in self._floors])
        for layer in self._states:
            layer.expect(self.step)
        self._moves = [((), 0)] * self.num_slots
        return self.step

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the nodes of ``path``, indices from the root on, of the tree just verified."""
        visit = self._history.visits[slot][-1]
        visit.step.paths[visit.row] = path
        in_place = next((i for i, node in enumerate(path) if node != i), len(path))
        self._moves[slot] = path[in_place:], self.lengths[slot] + in_place
        self.lengths[slot] += len(path)

    def insert(self, slot: int, own: TreeCache, floor: Floor) -> None:
        """Move a sequence from its own cache, which is empty then, into a slot.

        Args:
            slot: The slot.
            own: The cache, which `takes` has accepted. Its newest pass must be committed.
            floor: Function that returns the number of tokens that the sequence keeps whatever
                happens.
        """
        if not any(self._floors):
            self._begin(own)
        self.lengths[slot], self._floors[slot] = own.length, floor
        self._ends[slot] = 0  # nothing to keep of what the slot holds
        self._history.visits[slot], own.history.visits = own.history.visits[0], [[]]
        self._reserve(own.length + 1, self.max_nodes)
        self._ends[slot] = own.length
        rows, states = _split(own)
        for layer, one in zip(self._rows, rows, strict=True):
            layer.insert(slot, one)
        for state, one in zip(self._states, states, strict=True):
            state.insert(slot, self.num_slots, one)

    def leave(self, slot: int, own: TreeCache | None) -> None:
        """Make a slot idle.

        Args:
            slot: The slot.
            own: The cache of its sequence, into which to copy the entries. They include, after the
                committed entries, the root of a tree in flight. None discards them.
        """
        length = self.lengths[slot]
        if own is not None:
            self._write_aside()
            own.length, own.history.visits = length, [self._history.visits[slot]]
            step = ForwardPass(length, history=own.history)
            rows, states = _split(own)
            for layer, one in zip(self._rows, rows, strict=True):
                layer.extract(slot, one)
            for state, one in zip(self._states, states, strict=True):
                state.extract(slot, one, step)
        self.lengths[slot] = self._ends[slot] = 0
        self._moves[slot] = (), 0
        self._history.visits[slot], self._floors[slot] = [], None

    def shrink(self, slots: Sequence[int], num_slots: int) -> None:
        """Keep some slots, in this order, and only the room that their sequences need."""
        self.resize(slots, num_slots, max((self._ends[slot] for slot in slots), default=0))

    def resize(self, slots: Sequence[int], num_slots: int, num_rows: int) -> None:
        """Keep some slots, in this order, and add idle ones, with ``num_rows`` entries each."""
        self.capacity = whole(num_rows)
        num_idle = num_slots - len(slots)
        self.lengths = [self.lengths[slot] for slot in slots] + [0] * num_idle
        self._moves = [self._moves[slot] for slot in slots] + [((), 0)] * num_idle
        self._floors = [self._floors[slot] for slot in slots] + [None] * num_idle
        visits = self._history.visits
        self._history.visits = [visits[slot] for slot in slots] + [[] for _ in range(num_idle)]
        ends = [self._ends[slot] for slot in slots]
        self._ends = ends + [0] * num_idle
        kept = mx.array(list(slots), dtype=mx.int32)
        for layer in self._rows:
            layer.resize(kept, num_idle, ends)
        for state in self._states:
            state.resize(kept, num_idle)

    def _begin(self, own: TreeCache) -> None:
        """Make layers like those of a sequence, the first one."""
        if self._kinds != _kinds(own):
            self._kinds = _kinds(own)
            self.layers = [_layer(self, one) for one in own.layers]
            parts = flat(self.layers)
            self._rows = [part for part in parts if isinstance(part, BatchLayer)]
            self._states = [part for part in parts if isinstance(part, RecurrentCache)]

    def _reserve(self, num_rows: int, num_nodes: int) -> None:
        if num_rows > self.capacity or num_nodes > self.max_nodes:
            self.max_nodes = max(self.max_nodes, num_nodes)
            num_rows = max(num_rows, self.capacity)
            self.resize(range(self.num_slots), self.num_slots, num_rows)

    def _take_over_states(self) -> None:
        """Let layers take over the states after the accepted paths of the newest pass."""
        step = self.step
        if not self._states or step is None:
            return
        rows: list[int | None] = []
        for visits in self._history.visits:
            is_in = bool(visits) and visits[-1].step is step and bool(step.paths[visits[-1].row])
            rows.append(visits[-1].row if is_in else None)
        if not any(row is not None for row in rows):
            return
        num_rows = len(step.paths)
        for slot, floor in enumerate(self._floors[:num_rows]):
            if floor is None:  # an idle slot may take over any state
                rows[slot] = slot
        taken = None
        if rows != list(range(num_rows)):
            is_new = [row is not None for row in rows]
            taken = NewRows(mx.array([row or 0 for row in rows]), mx.array(is_new))
        for layer in self._states:
            layer.commit(taken=taken)

    def _write_aside(self) -> None:
        if any(nodes for nodes, _ in self._moves):
            for layer in self._rows:
                layer.write_aside(self._moves)
            self._moves = [((), 0)] * self.num_slots


class SlotCache:
    """A slot as the cache of its sequence; the batch runs its forward passes.

    ``own`` is the sequence's own cache, which is empty meanwhile.
    """

    def __init__(self, batch: BatchCache, slot: int, own: TreeCache):
        self._batch = batch
        self.slot = slot
        self.own = own

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._batch.lengths[self.slot]

    def commit(self, path: Sequence[int]) -> None:
        self._batch.commit(self.slot, path)

    def takes(self, tree: TokenTree) -> bool:
        """Return True, because the batch takes sequences only while that holds."""
        return True


def _layer(batch: BatchCache, own: Any) -> Any:
    """Make the layer of a batch that is like that of a single sequence."""
    if isinstance(own, CompositeCache):
        return CompositeCache(None, [_layer(batch, part) for part in own.parts])
    if isinstance(own, RecurrentCache):
        return RecurrentCache(ArraysCache(len(own.stock.cache)))
    return BATCH_LAYERS[type(own)](batch, own)


def _kinds(own: TreeCache) -> list[str]:
    return list(map(describe, own.stock))


def _split(own: TreeCache) -> tuple[list[Any], list[RecurrentCache]]:
    """Separate the parts of a cache that have K/V entries from those that have a state."""
    states = [part for part in own.parts if isinstance(part, RecurrentCache)]
    return [part for part in own.parts if part not in states], states
