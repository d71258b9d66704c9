"""A layer with a state instead of K/V entries: recurrences and convolutions.

The class holds the states of one sequence or of several, one row each. A pass over trees writes no
state. Instead, the hook of the layer provides a function for the state after paths of the trees.
The cache calls it for accepted paths and the end of a sequence; `tree_pass` keeps it until then.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_redrafter.target.caches.tree_cache import parts_of
from mlx_redrafter.target.caches.tree_pass import NewRows, State, StateAfter, StateRecord, TreePass
from mlx_redrafter.trees.tree import TreeBatch


class RecurrentCache:
    """The `LayerCache` of a layer with a state, on top of mlx-lm's ``ArraysCache``."""

    def __init__(self, stock: ArraysCache, step: TreePass | None = None):
        self.stock = stock
        self._enter(step or TreePass([0]))

    @property
    def trees(self) -> TreeBatch | None:
        """Trees of the next forward pass; None if it processes tokens that follow each other."""
        trees = self.step.trees
        return None if trees is None or trees.size == 1 else trees

    def expect(self, step: TreePass) -> None:
        self._take_over(step.taken)
        self._enter(step)

    def _enter(self, step: TreePass) -> None:
        # The number is the index of this layer's record in every pass.
        self.step, self._number = step, len(step.records)
        step.records.append(StateRecord(list(self.stock.cache)))

    def branch(self, state_after: StateAfter) -> None:
        """Record a pass over trees; ``state_after`` maps paths from the roots on to a state."""
        self._record.after = state_after

    def _take_over(self, taken: NewRows | bool) -> None:
        """Take over the states after the accepted paths of the pass."""
        after = self._record.after if taken else None
        if after is None:  # also if an error has ended the pass
            return
        state = after(self.step.accepted)
        if isinstance(taken, NewRows):
            state = [
                _selected(new, old, taken) for new, old in zip(state, self.stock.cache, strict=True)
            ]
        self._store(state)

    def trim_to(self, length: int) -> None:
        # If no pass has processed token ``length``, the state stays as it is.
        state = self.step.history.state(self._number, length)
        if state is not None:
            self._store(state)
        self.step = TreePass([length])

    def release(self) -> State:
        self._take_over(len(self.step.paths[0]) > 0)
        state: State = list(self.stock.cache)
        self._store([None] * len(state))
        return state

    def hold(self, entries: State, length: int) -> None:
        self._store(entries)

    def insert(self, slot: int, num_slots: int, entries: State, length: int) -> None:
        """Write the state of a sequence to a slot."""
        for index, part in enumerate(entries):
            if part is not None:
                rows = self.stock[index]
                if rows is None:
                    rows = mx.zeros((num_slots, *part.shape[1:]), part.dtype)
                # Not in place, because passes hold the array, too.
                self.stock[index] = mx.concatenate([rows[:slot], part, rows[slot + 1 :]])

    def extract(self, slot: int, length: int) -> State:
        """Copy the state of a slot after ``length`` tokens."""
        state = self.step.history.state(self._number, length, slot)
        if state is None:
            row = slice(slot, slot + 1)
            state = [None if array is None else array[row] for array in self.stock.cache]
        return [None if array is None else mx.contiguous(array) for array in state]

    def resize(self, slots: mx.array, num_blank: int, *room: object) -> None:
        """Keep some slots, in this order, and add blank ones."""
        for index, array in enumerate(self.stock.cache):
            if array is not None:
                widths = [(0, num_blank), *[(0, 0)] * (array.ndim - 1)]
                self.stock[index] = mx.pad(array[slots], widths)

    @property
    def _record(self) -> StateRecord:
        return self.step.records[self._number]

    def _store(self, state: State) -> None:
        for index, array in enumerate(state):
            self.stock[index] = array

    def __getitem__(self, index: int) -> mx.array | None:
        return self.stock[index]

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        """Store an array after committed tokens, record one after roots, ignore all others."""
        trees = self.step.trees
        if trees is None:
            self.stock[index] = value
        elif trees.size == 1:
            self._record.write(index, value)

    # The rest of the interface that mlx-lm models use.

    @property
    def lengths(self) -> mx.array | None:
        return self.stock.lengths

    def advance(self, num_tokens: int) -> None:
        self.stock.advance(num_tokens)

    def make_mask(self, num_tokens: int) -> mx.array | None:
        return self.stock.make_mask(num_tokens)


def _selected(new: mx.array | None, old: mx.array | None, taken: NewRows) -> mx.array | None:
    """Return the rows of a new array that sequences take over, and the others of the old one."""
    if new is None or old is None:
        return old
    is_new = taken.is_new.reshape(-1, *[1] * (new.ndim - 1))
    return mx.where(is_new, new[taken.rows], old)


def cache_among(*arguments: Any) -> RecurrentCache | None:
    """Find the cache of a layer with a state among the layer's arguments, or in a composite one."""
    return next((one for one in parts_of(arguments) if isinstance(one, RecurrentCache)), None)
