"""The caches of several sequences in one buffer per layer, each sequence at its own offset.

Axes: B slots, N nodes of each slot's tree.

A slot holds one sequence: its committed K/V entries come first, the entries of its tree follow.
Sequences accept different paths, so nothing is padded or rolled. Each pass writes, at the places of
each sequence, the accepted entries that are not in place yet and the entries of the new tree, with
one update per buffer. No mask lets anything attend to idle slots or to what others have left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_redrafter.target.caches.batch_layers import BATCH_LAYERS, BatchLayer, whole
from mlx_redrafter.target.caches.cache_kinds import describe
from mlx_redrafter.target.caches.recurrent import RecurrentCache
from mlx_redrafter.target.caches.tree_cache import TreeCache, parts_of
from mlx_redrafter.target.caches.tree_pass import History, Move, NewRows, TreePass, Visit
from mlx_redrafter.trees.tree import TokenTree, TreeBatch

# Function that returns the number of tokens that a sequence keeps whatever happens; the maximum
# integer for one that keeps no states to go back to.
Floor = Callable[[], int]


@dataclass(eq=False)
class Slot:
    """A slot as the cache of its sequence; the batch runs the forward passes."""

    batch: BatchCache
    number: int
    own: TreeCache | None = None  # the sequence's own cache, empty meanwhile; None for an idle slot
    length: int = 0  # number of committed tokens; 0 if the slot is idle
    floor: Floor = int  # returns 0
    end: int = 0  # position behind the last entry, of a tree or committed
    # True if its sequence has come since the newest pass of the batch, in which it may have been
    # before it left and came again: all its entries are in place.
    is_new: bool = True
    is_blank: bool = True  # whether no sequence has been here

    def commit(self, path: Sequence[int]) -> None:
        self.batch.commit(self.number, path)

    def takes(self, tree: TokenTree) -> bool:
        """Return True, because the batch takes sequences only while that holds."""
        return True


class BatchCache:
    """The caches of several sequences. The first one determines the kinds of its layers.

    ``layers`` is the model's ``cache=`` argument. ``capacity`` is the number of entries for which a
    slot has room if a layer attends to all tokens.
    """

    def __init__(self, has_buckets: bool = False):
        self._has_buckets = has_buckets
        self.layers: list[Any] = []
        self.capacity = 0
        self.slots: list[Slot] = []
        # Size of the largest trees so far.
        self._max_nodes = 1
        self._step: TreePass | None = None
        # The caches of a single sequence by kind and size.
        self._kinds: list[str] = []
        self._parts: list[BatchLayer | RecurrentCache] = []
        self._history = History(0)

    @property
    def num_slots(self) -> int:
        """Number of slots, B."""
        return len(self.slots)

    def make_room(self, num_sequences: int) -> None:
        """Have as many idle slots at least; the number of all slots is a power of two."""
        needed = sum(one.own is not None for one in self.slots) + num_sequences
        if needed > self.num_slots:
            num_slots = 1 << (needed - 1).bit_length()
            self.resize(range(self.num_slots), num_slots, self.capacity)

    def idle_slot(self) -> int:
        """Return the number of an idle slot, with twice as many slots if there was none."""
        self.make_room(1)
        return next(one.number for one in self.slots if one.own is None)

    def takes(self, own: TreeCache) -> bool:
        """Whether a slot can hold a sequence as it is, with layers like those of the others."""
        return own.may_move and (self._is_idle or self._kinds == _kinds(own))

    def expect(self, trees: TreeBatch) -> TreePass:
        """Make the next forward pass one over these trees, one per slot."""
        slots = self.slots
        lengths = [one.length for one in slots]
        taken, before = self._new_rows(), self._moves()
        step = TreePass(lengths, trees, self._history, self._has_buckets, taken, before)
        self._reserve(step.num_rows(), trees.size)
        self._step = step
        self._history.enter(step, [one.floor() for one in slots])
        for part in self._parts:
            part.expect(step)
        for one in slots:
            one.end, one.is_new = one.length + trees.size, False
        return step

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the nodes of ``path``, indices from the root on, of the tree just verified."""
        visit, one = self._history.visits[slot][-1], self.slots[slot]
        visit.step.keep(path, visit.row)
        one.length += len(path)

    def insert(self, slot: int, own: TreeCache, floor: Floor) -> None:
        """Move a sequence from its own cache, which is empty then, into a slot.

        `takes` must have accepted the cache, and its newest pass must be committed.
        """
        if self._is_idle:
            self._begin(own)
        is_blank = self.slots[slot].is_blank
        self.slots[slot] = Slot(self, slot, own, own.length, floor)  # and nothing at its end yet
        entries, self._history.visits[slot] = own.release()
        self._reserve(own.length + 1, self._max_nodes)
        self.slots[slot].end = own.length
        for part, one in zip(self._parts, entries, strict=True):
            if not is_blank and isinstance(part, BatchLayer):
                part.blank(slot)
            part.insert(slot, self.num_slots, one, own.length)

    def leave(self, slot: int, own: TreeCache | None) -> None:
        """Make a slot idle, and copy the entries into its sequence's own cache; None discards them.

        They include, after the committed entries, the root of a tree in flight.
        """
        if own is not None:
            self._write_aside()
            length = self.slots[slot].length
            entries = [part.extract(slot, length) for part in self._parts]
            own.hold(entries, self._history.visits[slot], length)
        self.slots[slot], self._history.visits[slot] = Slot(self, slot, is_blank=False), []

    def shrink(self) -> None:
        """Keep a slot for each sequence, rounded up to a power of two, and the room they need."""
        used = [one for one in self.slots if one.own is not None]
        num_slots = 1 << (len(used) - 1).bit_length() if used else 0
        num_rows = max((one.end for one in used), default=0)
        self.resize([one.number for one in used], num_slots, num_rows)

    def resize(self, slots: Sequence[int], num_slots: int, num_rows: int) -> None:
        """Keep some slots, in this order, and add idle ones, with ``num_rows`` entries each."""
        self.capacity = whole(num_rows)
        num_idle, visits = num_slots - len(slots), self._history.visits
        self.slots = [self.slots[slot] for slot in slots]
        ends = [one.end for one in self.slots]
        self.slots += [Slot(self, 0) for _ in range(num_idle)]
        for number, one in enumerate(self.slots):
            one.number = number
        self._history.visits = [visits[slot] for slot in slots] + [[] for _ in range(num_idle)]
        kept = mx.array(list(slots), dtype=mx.int32)
        for part in self._parts:
            part.resize(kept, num_idle, ends, self.capacity, self._max_nodes)

    @property
    def _is_idle(self) -> bool:
        return not any(one.own for one in self.slots)

    def _begin(self, own: TreeCache) -> None:
        """Make layers like those of a sequence, the first one."""
        if self._kinds != _kinds(own):
            self._kinds, step = _kinds(own), TreePass([0], history=self._history)
            self.layers = [_layer(one, step) for one in own.layers]
            self._parts = parts_of(self.layers)
            self.capacity = 0

    def _reserve(self, num_rows: int, num_nodes: int) -> None:
        if num_rows > self.capacity or num_nodes > self._max_nodes:
            self._max_nodes = max(self._max_nodes, num_nodes)
            num_rows = max(num_rows, self.capacity)
            self.resize(range(self.num_slots), self.num_slots, num_rows)

    def _new_rows(self) -> NewRows | bool:
        """Find the rows of states after the accepted paths of the newest pass to take over."""
        step = self._step
        if step is None or not step.records:
            return False
        rows = [one.row if one and step.paths[one.row] else None for one in self._newest()]
        if not any(row is not None for row in rows):
            return False
        num_rows = len(step.paths)
        for number, one in enumerate(self.slots[:num_rows]):
            if one.own is None:  # an idle slot may take over any state
                rows[number] = number
        if rows == list(range(num_rows)):
            return True
        is_new = [row is not None for row in rows]
        return NewRows(mx.array([row or 0 for row in rows]), mx.array(is_new))

    def _newest(self) -> list[Visit | None]:
        """Return the part of each slot in the newest pass; None if its sequence has come since."""
        both = zip(self.slots, self._history.visits, strict=True)
        return [None if slot.is_new else visits[-1] for slot, visits in both]

    def _moves(self) -> list[Move]:
        """Return the accepted nodes of each slot that are not in place."""
        return [one.step.moves[one.row] if one else ((), 0) for one in self._newest()]

    def _write_aside(self) -> None:
        """Write all accepted entries that are not in place."""
        moves = self._moves()
        if any(nodes for nodes, _ in moves):
            for part in self._parts:
                if isinstance(part, BatchLayer):
                    part.write_aside(moves)


def _layer(own: Any, step: TreePass) -> Any:
    """Make the layer of a batch that is like that of a single sequence."""
    if isinstance(own, CacheList):
        return CacheList(*(_layer(one, step) for one in own.caches))
    if isinstance(own, RecurrentCache):
        return RecurrentCache(ArraysCache(len(own.stock.cache)), step)
    return BATCH_LAYERS[type(own)](own)


def _kinds(own: TreeCache) -> list[str]:
    return list(map(describe, own.stock))
