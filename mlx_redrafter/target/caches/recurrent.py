"""A layer with a state instead of K/V entries: recurrences and convolutions.

A state cannot be shortened, so `RecurrentCache` keeps the state before the newest pass, and before
the previous pass if that was over a tree: a sequence may have to end before them. A pass over a
tree writes no state. Instead, the hook of the layer provides a function for the state after a path
of the tree. The cache calls it for the accepted path, and for the path at which a sequence ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_redrafter.target.caches.tree_cache import ForwardPass
from mlx_redrafter.trees.tree import TokenTree

# Arrays of mlx-lm's cache, all None before the first token.
State = list[mx.array | None]
StateAfter = Callable[[Sequence[int]], State]


class BranchPart(Protocol):
    """One array of a state, for any path of a tree; a tuple of arrays to compute it from."""

    def __iter__(self) -> Iterator[mx.array]: ...

    def array_after(self, path: Sequence[int]) -> mx.array: ...


@dataclass(frozen=True)
class BranchedState:
    """A `StateAfter` made of arrays, which a compiled pass can return."""

    parts: Sequence[BranchPart]

    def __call__(self, path: Sequence[int]) -> State:
        return [part.array_after(path) for part in self.parts]


class RecurrentCache:
    """The `LayerCache` of a layer with a state, on top of mlx-lm's ``ArraysCache``."""

    def __init__(self, stock: ArraysCache):
        self.stock = stock
        self.step = ForwardPass(0)
        # The newest pass, and the one before it if that was a tree.
        self._passes: list[_Pass] = []

    @property
    def tree(self) -> TokenTree | None:
        """Tree of the next forward pass; None for a pass over committed tokens."""
        return self.step.tree

    def expect(self, step: ForwardPass) -> None:
        self.step = step
        trees = [one for one in self._passes[-1:] if one.state_after is not None]
        self._passes = [*trees, _Pass(step.length, list(self.stock.cache))]

    def branch(self, state_after: StateAfter) -> None:
        """Record a pass over a tree; ``state_after`` maps a path from the root on to a state."""
        self._passes[-1].state_after = state_after

    @property
    def branched(self) -> StateAfter | None:
        """The argument of `branch` in the newest pass."""
        return self._passes[-1].state_after

    def commit(self, path: Sequence[int]) -> None:
        newest = self._passes[-1]
        newest.path = path
        self._store(newest.state(len(path)))

    def settle(self, length: int) -> None:
        # If neither pass has processed token ``length``, the state stays as it is.
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
        found: mx.array | None = self.stock[index]
        return found

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        """Store an array of the state after committed tokens, and ignore a state after a tree."""
        if self.tree is None:
            self.stock[index] = value

    # The rest of the interface that mlx-lm models use.

    @property
    def lengths(self) -> mx.array | None:
        return self.stock.lengths

    @property
    def left_padding(self) -> mx.array | None:
        return self.stock.left_padding

    def advance(self, num_tokens: int) -> None:
        self.stock.advance(num_tokens)

    def make_mask(self, num_tokens: int) -> mx.array | None:
        return self.stock.make_mask(num_tokens)


@dataclass
class _Pass:
    """A forward pass.

    Attributes:
        length: Number of committed tokens before the pass.
        before: The state before the pass.
        path: Accepted path of a tree; the root alone until `RecurrentCache.commit`.
        state_after: As in `RecurrentCache.branch`; None for a pass over committed tokens.
    """

    length: int
    before: State
    path: Sequence[int] = (0,)
    state_after: StateAfter | None = None

    def state(self, count: int) -> State:
        """Return the state after the first ``count`` nodes of the path."""
        if count == 0:
            return self.before
        assert self.state_after is not None
        return self.state_after(self.path[:count])
