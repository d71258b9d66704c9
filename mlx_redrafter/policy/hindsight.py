"""Drafts, verified or not, against the text that followed them."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_redrafter.trees.tree import Drafts

# Children of a node that are looked at, the best ones; nearly all others are wrong.
MOST_CHILDREN = 3


class Hindsight:
    """Which drafts of a tree the text has proved right or wrong, as far as it goes.

    Args:
        drafts: The drafts of a tree, best first.
    """

    def __init__(self, drafts: Drafts):
        self._tokens = drafts.tokens
        self._children: dict[int, list[int]] = {}
        for draft, parent in enumerate(drafts.parents):
            self._children.setdefault(parent, []).append(draft)
        # The node that the text has reached; None once it has left the tree.
        self._node: int | None = 0

    @property
    def is_over(self) -> bool:
        """Whether more text proves nothing more."""
        return self._node is None

    def follow(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """Drafts whose parents were right, by index, and whether they were, given more text."""
        found = []
        for token in tokens:
            if self._node is None:
                break
            children = self._children.get(self._node, [])
            self._node = None
            for rank, draft in enumerate(children):
                is_right = self._tokens[draft] == token
                if rank < MOST_CHILDREN:
                    found.append((draft, is_right))
                if is_right:
                    self._node = draft + 1
        return found
