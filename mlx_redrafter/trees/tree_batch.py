"""Token trees of several sequences for one forward pass.

Axes: B slots, N nodes of each slot's tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import mlx.core as mx

from mlx_redrafter.device_read import to_rows
from mlx_redrafter.trees.tree import NO_TOKEN, TokenTree, ancestor_mask


class TreeBatch:
    """Trees of several slots, with padding nodes up to the size of the largest tree.

    Args:
        drafts: For each slot a tree, or tokens that follow each other, int32, shape (n,).
        size: Number of nodes of each tree, N; that of the largest tree by default.

    Attributes:
        drafts: The trees and tokens, as given.
        size: Number of nodes of each tree, N.
        max_depths: Maximum depth of each tree.
    """

    def __init__(self, drafts: Sequence[mx.array | TokenTree], size: int | None = None):
        self.drafts = drafts
        self.max_depths = [
            one.max_depth if isinstance(one, TokenTree) else one.size - 1 for one in drafts
        ]
        self.size = max([one.size for one in drafts]) if size is None else size
        self._window_rows: dict[int, mx.array] = {}

    def __len__(self) -> int:
        return len(self.drafts)

    def of(self, slots: Sequence[int]) -> TreeBatch:
        """Select the trees of some slots, at the same size."""
        return TreeBatch([self.drafts[slot] for slot in slots], self.size)

    @property
    def has_padding(self) -> bool:
        """Whether some node is padding, or may be."""
        return any(
            one.size < self.size or (isinstance(one, TokenTree) and one.num_nodes < one.size)
            for one in self.drafts
        )

    @cached_property
    def tokens(self) -> mx.array:
        """Token ids, int32, shape (B, N)."""
        if self.size == 1 and not any(self.max_depths):
            roots = [one.tokens if isinstance(one, TokenTree) else one for one in self.drafts]
            return mx.concatenate(roots)[:, None]
        return self._stacked("tokens", NO_TOKEN)

    @cached_property
    def parents(self) -> mx.array:
        """Node index of each node's parent in its tree, int32, shape (B, N)."""
        return self._stacked("parents", 0)

    @cached_property
    def depths(self) -> mx.array:
        """Edges from the root, int32, shape (B, N)."""
        return self._stacked("depths", 0)

    @cached_property
    def ancestors(self) -> mx.array:
        """Ancestor masks, bool, shape (B, N, N): row n marks n and its ancestors."""
        if self._only is not None:
            return self._only.ancestors[None]
        return ancestor_mask(self.parents, max(self.max_depths))

    def read_parents(self) -> list[list[int]]:
        """Read the parents of each tree's nodes; blocks unless the host knows all trees."""
        read: list[list[int]] = []
        for one in self.drafts:
            if isinstance(one, TokenTree) and one.known is None:
                return to_rows(self.parents)
            known: Sequence[int] = range(one.size - 1)
            if isinstance(one, TokenTree):
                known = one.known.parents if one.known else []
            read.append([0, *known, *[0] * (self.size - 1 - len(known))])
        return read

    @cached_property
    def above(self) -> mx.array:
        """Ancestors of each node, without the node itself, bool, shape (B, N, N)."""
        return self.ancestors & ~mx.eye(self.size, dtype=mx.bool_)

    def window_rows(self, size: int) -> mx.array:
        """Find the inputs of a convolution over ``size`` tokens, for every node.

        Returns:
            The last ``size`` rows of each node's branch, int32, shape (B N, size). Each sequence
            has ``size`` - 1 rows of tokens before the root, then those of its nodes; rows count
            through all sequences.
        """
        if size not in self._window_rows:
            count, root = len(self), size - 1
            num_rows = root + self.size
            # Row before each row of a branch. No window reaches beyond the first row.
            before = mx.broadcast_to(mx.arange(-1, root), (count, size))
            above = mx.concatenate([before, self.parents[:, 1:] + root], axis=1)
            rows = [mx.broadcast_to(mx.arange(root, num_rows), (count, self.size))]
            for _ in range(root):
                rows.append(mx.take_along_axis(above, rows[-1], axis=1))
            first = mx.arange(0, count * num_rows, num_rows)[:, None, None]
            self._window_rows[size] = (mx.stack(rows[::-1], axis=2) + first).flatten(0, 1)
        return self._window_rows[size]

    @cached_property
    def parents_in_all(self) -> list[int]:
        """Parent of each node of all trees, counted through all trees; a root's is the root.

        Blocks until the drafter has made the trees, if the host does not know them.
        """
        starts = range(0, len(self) * self.size, self.size)
        parents = self.read_parents()
        return [first + node for first, one in zip(starts, parents, strict=True) for node in one]

    @cached_property
    def nodes_by_depth(self) -> list[list[int]]:
        """Nodes of all trees at each depth, roots first; blocks as `parents_in_all` does."""
        depths: list[int] = []
        for node, parent in enumerate(self.parents_in_all):
            depths.append(0 if parent == node else depths[parent] + 1)
        nodes: list[list[int]] = [[] for _ in range(max(depths) + 1)]
        for node, depth in enumerate(depths):
            nodes[depth].append(node)
        return nodes

    @property
    def _only(self) -> TokenTree | None:
        """The only tree, if it needs no padding."""
        one = self.drafts[0]
        is_only = len(self) == 1 and isinstance(one, TokenTree) and one.size == self.size
        return cast(TokenTree, one) if is_only else None

    def _stacked(self, name: str, padding: int) -> mx.array:
        """Pad and stack an array of all trees to shape (B, N)."""
        if self._only is not None:
            return cast(mx.array, getattr(self._only, name)[None])
        parts: list[mx.array] = []
        for one in self.drafts:
            parts.append(getattr(one, name) if isinstance(one, TokenTree) else _chain(one, name))
            if missing := self.size - parts[-1].shape[0]:
                parts.append(mx.full((missing,), padding, dtype=mx.int32))
        return mx.concatenate(parts).reshape(len(self), self.size)


# Depth and parent of a token alone, made once.
_ZERO = mx.array([0], dtype=mx.int32)


def _chain(tokens: mx.array, name: str) -> mx.array:
    """Return an array of the tree of tokens that follow each other."""
    if name == "tokens":
        return tokens
    if tokens.shape[0] == 1:
        return _ZERO
    depths = mx.arange(tokens.shape[0], dtype=mx.int32)
    return depths if name == "depths" else mx.maximum(depths - 1, 0)
