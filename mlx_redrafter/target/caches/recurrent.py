"""A layer with a state instead of rows: recurrences and convolutions, on mlx-lm's ``ArraysCache``.

A state cannot be cut, so `RecurrentCache` keeps the one before each pass that a text may have to go
back behind: the newest pass, and the tree before it. In a pass over a tree nothing is written. The
hook of the layer says how to compute the state after any path of it, and only the paths that are
accepted, or that a text ends in, are ever computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_redrafter.target.caches.tree_cache import ForwardPass
from mlx_redrafter.trees.tree import TokenTree

# The arrays of mlx-lm's cache; all None where nothing was processed.
State = list[mx.array | None]
StateAfter = Callable[[Sequence[int]], State]


class RecurrentCache:
    """The `LayerCache` of a layer with a state."""

    def __init__(self, stock: ArraysCache):
        self.stock = stock
        self.step = ForwardPass(0)
        # The newest pass, and the one before it if that was a tree.
        self._passes: list[_Pass] = []

    @property
    def tree(self) -> TokenTree | None:
        """The tree of the next forward pass; None where it processes committed tokens."""
        return self.step.tree

    def expect(self, step: ForwardPass) -> None:
        """See `LayerCache.expect`."""
        self.step = step
        trees = [one for one in self._passes[-1:] if one.state_after is not None]
        self._passes = [*trees, _Pass(step.length, list(self.stock.cache))]

    def branch(self, state_after: StateAfter) -> None:
        """Take over a pass over a tree.

        Args:
            state_after: Function of a path, node indices from the root on, that returns the state
                after its last node.
        """
        self._passes[-1].state_after = state_after

    def commit(self, path: Sequence[int]) -> None:
        """See `LayerCache.commit`."""
        newest = self._passes[-1]
        newest.path = path
        self._store(newest.state(len(path)))

    def settle(self, length: int) -> None:
        """See `LayerCache.settle`; where no pass kept here knows ``length``, the state stays."""
        for one in reversed(self._passes):
            count = length - one.length
            if count == 0 or (one.state_after is not None and 0 < count <= len(one.path)):
                self._store(one.state(count))
                break
        self._passes = []
        self.step = ForwardPass(length)

    def _store(self, state: State) -> None:
        for index, array in enumerate(state):
            self.stock[index] = array

    def __getitem__(self, index: int) -> mx.array | None:
        """An array of the state before the pass, or after it where its tokens are committed."""
        found: mx.array | None = self.stock[index]
        return found

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        """Store an array of the state after committed tokens; that after a tree is not used."""
        if self.tree is None:
            self.stock[index] = value

    @property
    def lengths(self) -> mx.array | None:
        """None, as mlx-lm has it for a single text."""
        return self.stock.lengths

    @property
    def left_padding(self) -> mx.array | None:
        """None, as mlx-lm has it for a single text."""
        return self.stock.left_padding

    def advance(self, num_tokens: int) -> None:
        """Nothing, as in mlx-lm for a single text."""
        self.stock.advance(num_tokens)

    def make_mask(self, num_tokens: int) -> mx.array | None:
        """None, as mlx-lm has it for a single text."""
        return self.stock.make_mask(num_tokens)


@dataclass
class _Pass:
    """A forward pass.

    Attributes:
        length: Committed tokens before it.
        before: The state before it.
        path: Nodes of a tree that a text may end in.
        state_after: As in `RecurrentCache.branch`; None for committed tokens.
    """

    length: int
    before: State
    path: Sequence[int] = (0,)
    state_after: StateAfter | None = None

    def state(self, count: int) -> State:
        """The state after the first ``count`` nodes of the path."""
        if count == 0:
            return self.before
        assert self.state_after is not None
        return self.state_after(self.path[:count])
