"""Token trees of several texts, as one forward pass has them.

Axes: B slots, N nodes of each slot's tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx

from mlx_redrafter.trees.tree import NO_TOKEN, TokenTree, ancestor_mask


class TreeBatch:
    """Trees beside each other, with padding nodes up to the size of the largest.

    Args:
        drafts: For each slot a tree, or a root alone, int32, shape (1,), which is a token.
        size: Number of nodes of each tree, N; that of the largest by default.

    Attributes:
        drafts: The trees and roots, as given.
        size: Number of nodes of each tree, N.
        max_depths: Bounds on the depths of each tree's nodes.
    """

    def __init__(self, drafts: Sequence[mx.array | TokenTree], size: int | None = None):
        self.drafts = drafts
        self.max_depths = [one.max_depth if isinstance(one, TokenTree) else 0 for one in drafts]
        self.size = max(map(tree_size, drafts)) if size is None else size

    def __len__(self) -> int:
        return len(self.drafts)

    def of(self, slots: Sequence[int]) -> TreeBatch:
        """The trees of some slots, of the same size."""
        return TreeBatch([self.drafts[slot] for slot in slots], self.size)

    @cached_property
    def tokens(self) -> mx.array:
        """Token ids, int32, shape (B, N)."""
        rows = [one.tokens if isinstance(one, TokenTree) else one for one in self.drafts]
        return self._stacked(rows, NO_TOKEN)

    @cached_property
    def parents(self) -> mx.array:
        """Node index of each node's parent in its tree, int32, shape (B, N)."""
        if self.size == 1:
            return mx.zeros((len(self), 1), dtype=mx.int32)
        root = mx.zeros((1,), dtype=mx.int32)
        rows = [one.parents if isinstance(one, TokenTree) else root for one in self.drafts]
        return self._stacked(rows, 0)

    @cached_property
    def depths(self) -> mx.array:
        """Edges from the root, int32, shape (B, N)."""
        if self.size == 1:
            return self.parents
        root = mx.zeros((1,), dtype=mx.int32)
        rows = [one.depths if isinstance(one, TokenTree) else root for one in self.drafts]
        return self._stacked(rows, 0)

    @cached_property
    def ancestors(self) -> mx.array:
        """Ancestor masks, bool, shape (B, N, N): row n marks n and its ancestors."""
        return ancestor_mask(self.parents, max(self.max_depths))

    def _stacked(self, rows: Sequence[mx.array], padding: int) -> mx.array:
        """Rows of shape (N,) or less, padded, as an array of shape (B, N)."""
        parts: list[mx.array] = []
        for row in rows:
            parts.append(row)
            if missing := self.size - row.shape[0]:
                parts.append(mx.full((missing,), padding, dtype=mx.int32))
        return mx.concatenate(parts).reshape(len(self), self.size)


def tree_size(drafts: mx.array | TokenTree) -> int:
    """Number of nodes of a tree, or of a root alone."""
    return drafts.size if isinstance(drafts, TokenTree) else 1
