"""The cache of a request while trees are decoded: one cache per layer, each committing itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.trees.tree import TokenTree


class ForwardPass:
    """What a forward pass of the target processes, with masks made once for all layers.

    Attributes:
        length: Committed tokens before the pass.
        tree: The tree that is verified; None for committed tokens.
    """

    def __init__(self, length: int, tree: TokenTree | None = None):
        self.length = length
        self.tree = tree
        self._chunk_masks: dict[tuple[int, int], mx.array] = {}
        self._window_rows: dict[int, mx.array] = {}

    @cached_property
    def tree_mask(self) -> mx.array:
        """Nodes seeing all committed tokens and their ancestors, bool, shape (N, length + N)."""
        assert self.tree is not None
        ancestors = self.tree.ancestors
        committed = mx.ones((ancestors.shape[0], self.length), dtype=mx.bool_)
        return mx.concatenate([committed, ancestors], axis=1)

    @cached_property
    def parents(self) -> list[int]:
        """Parent of each node; waits for the tree, not for the target, unless the host knows it."""
        assert self.tree is not None
        known = self.tree.known
        return to_ints(self.tree.parents) if known is None else [0, *known.parents]

    @cached_property
    def levels(self) -> list[list[int]]:
        """Nodes at each depth, the root's first; waits as `parents` does."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        levels: list[list[int]] = [[] for _ in range(max(depths) + 1)]
        for node, depth in enumerate(depths):
            levels[depth].append(node)
        return levels

    def window_mask(self, window: int, first: int = 0) -> mx.array:
        """Nodes seeing the last ``window`` tokens of their own text, themselves included.

        Args:
            window: Tokens that a node sees.
            first: Position of the first token that has a column.

        Returns:
            Bool, shape (N, length - first + N).
        """
        assert self.tree is not None
        depths = self.tree.depths
        is_near = mx.arange(first - self.length, 0) > depths[:, None] - window
        ancestors = self.tree.ancestors & (depths[:, None] - depths < window)
        return mx.concatenate([is_near, ancestors], axis=1)

    def chunk_mask(self, chunk: int, first: int) -> mx.array:
        """Nodes seeing the tokens of their own text since the last multiple of ``chunk``.

        Args:
            chunk: Tokens of a chunk.
            first: Position of the first token that has a column.

        Returns:
            Bool, shape (N, length - first + N).
        """
        if (chunk, first) not in self._chunk_masks:
            assert self.tree is not None
            own = (self.length + self.tree.depths) // chunk
            is_near = mx.arange(first, self.length) // chunk == own[:, None]
            ancestors = self.tree.ancestors & (own == own[:, None])
            self._chunk_masks[chunk, first] = mx.concatenate([is_near, ancestors], axis=1)
        return self._chunk_masks[chunk, first]

    def window_rows(self, size: int) -> mx.array:
        """What a convolution sees of the ``size`` - 1 rows before the root and those of the nodes.

        Returns:
            For each node, the last ``size`` rows of its branch, int32, shape (N, size).
        """
        if size not in self._window_rows:
            assert self.tree is not None
            root = size - 1
            # The row before each row of a branch; no window reaches behind the first one.
            above = mx.concatenate([mx.arange(-1, root), self.tree.parents[1:] + root])
            rows = [mx.arange(root, root + self.tree.size)]
            for _ in range(root):
                rows.append(above[rows[-1]])
            self._window_rows[size] = mx.stack(rows[::-1], axis=1)
        return self._window_rows[size]


class LayerCache(Protocol):
    """One layer's cache: what mlx-lm models ask of it, and the steps of a tree.

    Attributes:
        stock: The mlx-lm cache that holds the rows, and that `settle` leaves as mlx-lm would.
    """

    stock: Any

    def expect(self, step: ForwardPass) -> None:
        """Prepare for the next forward pass."""
        ...

    def commit(self, path: Sequence[int]) -> None:
        """Keep the nodes of ``path``, indices from the root on, of the tree just verified."""
        ...

    def settle(self, length: int) -> None:
        """Leave the stock cache holding exactly the first ``length`` tokens."""
        ...


class TreeCache:
    """The layers of a request and the number of its committed tokens.

    Attributes:
        layers: The model's ``cache=`` argument.
        length: Committed tokens.
    """

    def __init__(self, layers: Sequence[LayerCache], length: int):
        self.layers = list(layers)
        self.length = length

    @property
    def stock(self) -> list[Any]:
        """The mlx-lm caches of the layers."""
        return [layer.stock for layer in self.layers]

    def expect(self, tree: TokenTree | None) -> None:
        """Make the next forward pass one over a tree, or over committed tokens."""
        step = ForwardPass(self.length, tree)
        for layer in self.layers:
            layer.expect(step)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the nodes of ``path``, indices from the root on, of the tree just verified."""
        for layer in self.layers:
            layer.commit(path)
        self.grow(len(path))

    def grow(self, num_tokens: int) -> None:
        """Count tokens whose rows are there now."""
        self.length += num_tokens

    def takes(self, tree: TokenTree) -> bool:
        """Whether every node of a tree would see what it sees where tokens come one by one."""
        return True

    def settle(self, length: int) -> None:
        """Leave the stock caches holding exactly the first ``length`` tokens.

        The row of the newest tree's root counts as one that is there. Safe after an interruption.
        """
        for layer in self.layers:
            layer.settle(length)
        self.length = length
