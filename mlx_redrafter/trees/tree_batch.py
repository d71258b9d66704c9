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
        drafts: For each slot a tree, or the token of a root alone, int32, shape (1,).
        size: Number of nodes of each tree, N; that of the largest tree by default.

    Attributes:
        drafts: The trees and roots, as given.
        size: Number of nodes of each tree, N.
        max_depths: Maximum depth of each tree.
    """

    def __init__(self, drafts: Sequence[mx.array | TokenTree], size: int | None = None):
        self.drafts = drafts
        self.max_depths = [one.max_depth if isinstance(one, TokenTree) else 0 for one in drafts]
        self.size = max(map(tree_size, drafts)) if size is None else size

    def __len__(self) -> int:
        return len(self.drafts)

    def of(self, slots: Sequence[int]) -> TreeBatch:
        """Select the trees of some slots, at the same size."""
        return TreeBatch([self.drafts[slot] for slot in slots], self.size)

    @cached_property
    def tokens(self) -> mx.array:
        """Token ids, int32, shape (B, N)."""
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
            known = one.known.parents if isinstance(one, TokenTree) and one.known else []
            read.append([0, *known, *[0] * (self.size - 1 - len(known))])
        return read

    @property
    def _only(self) -> TokenTree | None:
        """The only tree, if it needs no padding."""
        one = self.drafts[0]
        is_only = len(self) == 1 and isinstance(one, TokenTree) and one.size == self.size
        return cast(TokenTree, one) if is_only else None

    def _stacked(self, name: str, padding: int) -> mx.array:
        """Pad and stack an array of all trees to shape (B, N); a root alone is its token."""
        if self._only is not None:
            return cast(mx.array, getattr(self._only, name)[None])
        root = None if name == "tokens" else mx.zeros((1,), dtype=mx.int32)
        parts: list[mx.array] = []
        for one in self.drafts:
            if isinstance(one, TokenTree):
                parts.append(getattr(one, name))
            else:
                parts.append(one if root is None else root)
            if missing := self.size - parts[-1].shape[0]:
                parts.append(mx.full((missing,), padding, dtype=mx.int32))
        return mx.concatenate(parts).reshape(len(self), self.size)


def tree_size(drafts: mx.array | TokenTree) -> int:
    """Return the number of nodes of a tree, or of a root alone."""
    return drafts.size if isinstance(drafts, TokenTree) else 1
