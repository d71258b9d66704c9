"""Forward passes over the trees of one or several sequences, and the states that follow them.

A pass knows which K/V entries its nodes attend to. A state of a recurrent layer cannot be
shortened. So each pass records, for every layer with a state, the state before the pass and a
function for the state after paths of its trees. `History` keeps passes to go back to.

Axes: B sequences, N nodes of each tree, P nodes of the longest path, S entries of each sequence, K
accepted entries that are not in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import mlx.core as mx

from mlx_redrafter.target.few_shapes import bucket
from mlx_redrafter.target.hooks import TreePositions
from mlx_redrafter.trees.tree import TreeBatch

# Arrays of a layer's state, each with B rows; all None before the first token.
State = list[mx.array | None]
# Accepted nodes of a tree whose K/V entries are not in place, and the position of the first.
Move = tuple[Sequence[int], int]


@dataclass(eq=False)
class Layout:
    """Entries of one size of buffers, with the entries of a tree behind the committed ones."""

    trees: TreeBatch
    starts: mx.array  # position of each root, int32, shape (B, 1)
    num_rows: int  # S
    first: int | mx.array = 0  # position of the first entry, an int or an int32 array of shape ()
    # Size of buffers in which new entries have overwritten old ones: the entry of position p has
    # the place p modulo the capacity. None if all entries are in order.
    capacity: int | None = None
    # Number of entries before the root, if it is one for all sequences and the host knows it: then
    # the mask takes fewer operations.
    num_before: int | None = None
    _masks: dict[tuple[str, int], mx.array] = field(default_factory=dict)

    @cached_property
    def mask(self) -> mx.array:
        """Mask of all committed tokens and a node's ancestors, bool, shape (B, 1, N, S)."""
        return self._is_seen[:, None]

    def window_mask(self, window: int | None) -> mx.array:
        """Mask all but the last ``window`` tokens of each node's own path, the node included."""
        if window is None:
            return self.mask
        return self._near("window", window, lambda: self._positions > self._nodes - window)

    def chunk_mask(self, chunk: int) -> mx.array:
        """Mask all but the tokens of each node's own path since the last multiple of ``chunk``."""
        return self._near("chunk", chunk, lambda: self._positions // chunk == self._nodes // chunk)

    def _near(self, kind: str, size: int, is_near: Callable[[], mx.array]) -> mx.array:
        """Return the mask of those entries only, which is made once."""
        if (kind, size) not in self._masks:
            self._masks[kind, size] = (self._is_seen & is_near())[:, None]
        return self._masks[kind, size]

    @cached_property
    def _nodes(self) -> mx.array:
        """Position of each node, shape (B, N, 1)."""
        return (self.starts + self.trees.depths)[..., None]

    @cached_property
    def _behind(self) -> mx.array:
        """Distance of each entry behind the root, negative before it, shape (B, S)."""
        places = mx.arange(self.num_rows, dtype=mx.int32)
        if self.capacity is None:
            return places - (self.starts - self.first)
        last = self.trees.size - 1
        return last - (self.starts + last - places) % self.capacity

    @cached_property
    def _node(self) -> mx.array:
        """Node of each entry, junk for an entry of no node, shape (B, S)."""
        return mx.clip(self._behind, 0, self.trees.size - 1)

    @cached_property
    def _positions(self) -> mx.array:
        """Position of each entry, junk for an entry of no token, shape (B, 1, S)."""
        before = self.starts + mx.minimum(self._behind, 0)
        if self.trees.size > 1:
            depths = mx.take_along_axis(self.trees.depths, self._node, axis=1)
            before = mx.where(self._behind > 0, self.starts + depths, before)
        return before[:, None]

    @cached_property
    def _is_seen(self) -> mx.array:
        """Whether an entry is committed, or of a node's ancestor or the node, (B, N, S)."""
        num_nodes = self.trees.size
        if self.num_before is not None:
            missing = self.num_rows - self.num_before - num_nodes
            is_there = mx.ones((1, num_nodes, self.num_before), mx.bool_)
            parts = [is_there, self.trees.ancestors, mx.zeros((1, num_nodes, missing), mx.bool_)]
            return mx.concatenate(parts if missing else parts[:2], axis=2)
        behind = self._behind
        is_there = behind < 1 if num_nodes == 1 else behind < 0
        if self.capacity is not None:  # a ring that has come round for some sequences only
            is_there = is_there & (behind >= -self.starts)
        if num_nodes == 1:
            return is_there[:, None]
        is_node = (behind >= 0) & (behind < num_nodes)
        nodes = mx.broadcast_to(self._node[:, None], (behind.shape[0], num_nodes, self.num_rows))
        is_above = mx.take_along_axis(self.trees.ancestors, nodes, axis=2)
        return is_there[:, None] | (is_above & is_node[:, None])


class Paths:
    """Paths through trees from the root on: B lists of nodes; arrays are padded with the last."""

    def __init__(self, paths: Sequence[Sequence[int]], num_nodes: int):
        self.paths = paths
        self.num_nodes = num_nodes

    @cached_property
    def nodes(self) -> mx.array:
        """Nodes of the paths, int32, shape (B, P)."""
        longest = max(map(len, self.paths))
        padded = [[*path, *[path[-1]] * (longest - len(path))] for path in self.paths]
        return mx.array(padded, dtype=mx.int32)

    @cached_property
    def is_node(self) -> mx.array | None:
        """Mask of padding, bool, shape (B, P), False for padding; None if there is none."""
        lengths = list(map(len, self.paths))
        if min(lengths) == max(lengths):
            return None
        return mx.arange(max(lengths)) < mx.array(lengths)[:, None]

    @cached_property
    def last(self) -> mx.array:
        """Last node of each path, counted through all trees, int32, shape (B,)."""
        last = [slot * self.num_nodes + path[-1] for slot, path in enumerate(self.paths)]
        return mx.array(last, dtype=mx.int32)


class UnreadPath(Paths):
    """The accepted path of a single sequence, before the host has read it.

    The path, int32, shape (L,), has junk after the accepted nodes. The number of accepted drafts,
    and ``length``, that of accepted nodes with the root, are int32 of shape (1,). ``is_in_place``
    is whether the path consists of the first nodes of the tree, in order.
    """

    def __init__(self, path: mx.array, num_accepted: mx.array, num_nodes: int, is_in_place: bool):
        self.max_length = path.shape[0]
        self.is_in_place = is_in_place
        super().__init__([range(self.max_length)], num_nodes)
        self.length = num_accepted + 1
        order = mx.arange(self.max_length)
        self.last = path[num_accepted]
        self.nodes = path[mx.minimum(order, num_accepted)][None]
        self.is_node = (order <= num_accepted)[None]


StateAfter = Callable[[Paths], State]


class BranchPart(Protocol):
    """One array of a state, for any paths of trees; a tuple of arrays to compute it from."""

    def __iter__(self) -> Iterator[mx.array]: ...

    def array_after(self, paths: Paths) -> mx.array: ...


@dataclass(frozen=True)
class BranchedState:
    """A `StateAfter` made of arrays, which a compiled pass can return."""

    parts: Sequence[BranchPart]

    def __call__(self, paths: Paths) -> State:
        return [part.array_after(paths) for part in self.parts]


class StateRecord:
    """States of a layer before a pass, and after paths of its trees; None for committed tokens."""

    def __init__(self, before: State):
        self.before = before
        self.after: StateAfter | None = None
        self._written: State = []

    def write(self, index: int, array: mx.array | None) -> None:
        """Record an array of the state after roots alone, which the stock layer has computed."""
        if self.after is None:
            written = self._written = list(self.before)
            self.after = lambda paths: written
        self._written[index] = array


class NewRows(NamedTuple):
    """Rows of the states after a pass that sequences take over."""

    rows: mx.array  # row of each sequence, int32, shape (B,)
    is_new: mx.array  # whether a sequence takes over a row or keeps its state, bool, shape (B,)


class Places(NamedTuple):
    """Places of the K/V entries of several sequences in one buffer per layer, which is a ring.

    The entry of position p has the place p modulo the capacity. A layer that attends to all tokens
    has room for the longest sequence, so that its entries stay in order. Layers with a window or
    chunks have less room and overwrite entries that no token reaches any more.

    Attributes:
        nodes: Accepted nodes of the newest trees whose entries are not in place, K per slot, shape
            (B, 1, K, 1); None if K is 0.
        rows: Places of these K and of N new entries, shape (B, 1, K + N, 1).
    """

    nodes: mx.array | None
    rows: mx.array

    @classmethod
    def of(
        cls, moves: Sequence[Move], lengths: Sequence[int], num_nodes: int, capacity: int
    ) -> Places:
        """Find the places of accepted entries and of the entries of new trees.

        Slots with fewer entries to move than others write the place behind the last one.
        """
        width = max(len(nodes) for nodes, _ in moves)
        nodes, rows = [], []
        for (moved, start), length in zip(moves, lengths, strict=True):
            missing = width - len(moved)
            nodes.append([*moved, *[0] * missing])
            positions = *range(start, start + len(moved)), *range(length, length + num_nodes)
            places = [position % capacity for position in positions]
            rows.append([*places[: len(moved)], *[capacity] * missing, *places[len(moved) :]])
        shape = len(rows), 1, -1, 1
        moved_nodes = mx.array(nodes, dtype=mx.int32).reshape(shape) if width else None
        return cls(moved_nodes, mx.array(rows, dtype=mx.int32).reshape(shape))


class TreePass:
    """A forward pass of the target.

    Attributes:
        lengths: Number of committed tokens of each sequence before the pass.
        trees: The trees that the target verifies; None for a pass over committed tokens.
        history: Passes before this one, and this one.
        has_buckets: Whether trees attend to whole buckets of K/V entries, as in `few_shapes`.
        taken: Rows of the states after the pass before this one that the sequences take over; True
            if each takes over its own, False if none does.
        before: Moves after the pass before this one, for several sequences.
        paths: The accepted path of each tree, empty until its sequence commits it.
        moves: The part of each path that is not in place.
        records: States of the layers that have one, in the order of the layers.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        trees: TreeBatch | None = None,
        history: History | None = None,
        has_buckets: bool = False,
        taken: NewRows | bool = False,
        before: Sequence[Move] = (),
    ):
        self.lengths = list(lengths)
        self.trees = trees
        self.history = history or History(len(self.lengths))
        self.has_buckets = has_buckets
        self.taken = taken
        self.before = before
        self.moves: list[Move] = [((), length) for length in self.lengths]
        self.paths: list[Sequence[int]] = [()] * len(self.lengths)
        self.records: list[StateRecord] = []
        self._layouts: dict[tuple[int, int | None], Layout] = {}
        self._places: dict[int, Places] = {}

    @property
    def length(self) -> int:
        """The largest number of committed tokens."""
        return max(self.lengths)

    def place(self, length: int) -> None:
        """Set the number of committed tokens, of which the pass of one sequence knew a bound."""
        self.lengths[0] = length
        self.moves[0] = (), length

    def num_rows(self, first: int = 0) -> int:
        """Return the number of entries that trees attend to, from position ``first`` on."""
        assert self.trees is not None
        num_rows = self.length + self.trees.size - first
        return bucket(num_rows) if self.has_buckets else num_rows

    def layout(self, first: int = 0, capacity: int | None = None) -> Layout:
        """Return the layout of buffers with a first entry at position ``first``, made once.

        ``capacity`` is the size of the buffers of several sequences, which are rings; None for one.
        """
        key = first, capacity
        if key not in self._layouts:
            assert self.trees is not None
            num_rows, num_before = self.num_rows(first), None
            if capacity is None:
                num_before = self.length - first
            else:
                num_rows = min(num_rows, capacity)
                if self.length + self.trees.size <= capacity:
                    capacity = None
            self._layouts[key] = Layout(
                self.trees, self.starts, num_rows, first, capacity, num_before
            )
        return self._layouts[key]

    def places(self, capacity: int) -> Places:
        """Return the places of new entries, and of those that the pass before has not put there."""
        if capacity not in self._places:
            assert self.trees is not None
            self._places[capacity] = Places.of(self.before, self.lengths, self.trees.size, capacity)
        return self._places[capacity]

    @cached_property
    def starts(self) -> mx.array:
        """Position of each root, int32, shape (B, 1)."""
        return mx.array([[length] for length in self.lengths], dtype=mx.int32)

    @property
    def tokens(self) -> mx.array:
        """Token ids of all nodes, with token 0 as padding, int32, shape (B, N)."""
        assert self.trees is not None
        tokens = self.trees.tokens
        return mx.maximum(tokens, 0) if self.trees.has_padding else tokens

    @property
    def positions(self) -> TreePositions:
        """Positions of all nodes, for rotary embeddings and others."""
        assert self.trees is not None
        nodes = self.starts if self.trees.size == 1 else self.starts + self.trees.depths
        ends = zip(self.lengths, self.trees.max_depths, strict=True)
        return TreePositions(nodes, [range(n, n + depth + 1) for n, depth in ends])

    def keep(self, path: Sequence[int], row: int = 0) -> None:
        """Note the accepted path of a sequence."""
        self.paths[row] = path
        in_place = next((i for i, node in enumerate(path) if node != i), len(path))
        self.moves[row] = path[in_place:], self.lengths[row] + in_place

    @cached_property
    def accepted(self) -> Paths:
        """The accepted paths, or the root alone if a sequence has accepted none."""
        assert self.trees is not None
        return Paths([path or (0,) for path in self.paths], self.trees.size)


class Visit(NamedTuple):
    """The part of one sequence in a pass: a row of its arrays."""

    step: TreePass
    row: int

    def goes_beyond(self, length: int) -> bool:
        """Whether the accepted path ends behind the first ``length`` tokens."""
        path = self.step.paths[self.row]
        return bool(path) and self.step.lengths[self.row] + len(path) > length

    def state(self, number: int, length: int) -> State | None:
        """Return the state of a layer after ``length`` tokens; None if the pass lacks it.

        Of a path that is not accepted yet, the root alone counts.
        """
        if number >= len(self.step.records):  # an error has ended the pass before this layer
            return None
        record, path = self.step.records[number], self.step.paths[self.row] or (0,)
        count = length - self.step.lengths[self.row]
        if count == 0:
            state = record.before
        elif record.after is not None and 0 < count <= len(path):
            assert self.step.trees is not None
            paths: list[Sequence[int]] = [(0,)] * len(self.step.paths)
            paths[self.row] = path[:count]
            state = record.after(Paths(paths, self.step.trees.size))
        else:
            return None
        if len(self.step.paths) == 1:
            return state
        row = slice(self.row, self.row + 1)
        return [None if array is None else array[row] for array in state]


class History:
    """The passes in which the states are that sequences may still have to go back to.

    ``visits`` has the parts of each sequence, from the oldest pass to the newest.
    """

    def __init__(self, num_sequences: int):
        self.visits: list[list[Visit]] = [[] for _ in range(num_sequences)]

    def enter(self, step: TreePass, floors: Sequence[int]) -> None:
        """Add a pass of all sequences, and drop those that end at or before the floors.

        A floor is the number of tokens that a sequence keeps whatever happens.
        """
        for row, floor in enumerate(floors):
            kept = [visit for visit in self.visits[row] if visit.goes_beyond(floor)]
            self.visits[row] = [*kept, Visit(step, row)]

    def state(self, number: int, length: int, slot: int = 0) -> State | None:
        """Return the state of a layer after ``length`` tokens; None if no pass has it."""
        states = (visit.state(number, length) for visit in reversed(self.visits[slot]))
        return next((state for state in states if state is not None), None)
