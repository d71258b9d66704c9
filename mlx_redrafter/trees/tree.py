"""Token trees: the drafts that one forward pass verifies, of one sequence or of several.

Axes: B slots, N nodes of each slot's tree (node 0 is the root).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from struct import pack, unpack
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.device_read import to_ints, to_rows

# Token id of padding nodes.
NO_TOKEN = -1


class Drafts(NamedTuple):
    """The drafts of a tree on the host: all nodes except the root, as in `TokenTree`."""

    scores: list[float]
    depths: list[int]
    parents: list[int]
    tokens: list[int]

    def first(self, count: int) -> Drafts:
        return Drafts._make(values[:count] for values in self)

    def chosen(self, drafts: Sequence[int]) -> Drafts:
        """Return some drafts, by their indices, parents before children."""
        place = {0: 0} | {draft + 1: i for i, draft in enumerate(drafts, start=1)}
        return Drafts(
            scores=[self.scores[draft] for draft in drafts],
            depths=[self.depths[draft] for draft in drafts],
            parents=[place[self.parents[draft]] for draft in drafts],
            tokens=[self.tokens[draft] for draft in drafts],
        )


@dataclass(frozen=True)
class TokenTree:
    """Drafts merged into one tree, parents before children, siblings distinct.

    Padding nodes are children of the root with the token -1, which no token equals.

    Attributes:
        tokens: Token ids, int32, shape (N,).
        parents: Node index of each node's parent, int32, shape (N,); the root's is 0.
        depths: Edges from the root, int32, shape (N,).
        ancestors: Ancestor mask, bool, shape (N, N): row n marks n and its ancestors.
        num_nodes: Number of nodes without padding, root included.
        max_depth: Maximum depth of a node.
        packed: Arrays that `read` needs, in one, int32, shape (4 (N - 1),), or for a chain, which
            needs only tokens and scores, (2 (N - 1),); None if nothing reads the drafts, or they
            are known.
        known: Drafts that are on the host already, without padding, or None.
        is_chain: Whether every draft is a child of the previous node, which needs far fewer
            operations.
        find_others: Function that finds drafts of another source for the same step, once the newest
            pass is read; None without one.
    """

    tokens: mx.array
    parents: mx.array
    depths: mx.array
    ancestors: mx.array
    num_nodes: int
    max_depth: int
    packed: mx.array | None = None
    known: Drafts | None = None
    is_chain: bool = False
    find_others: Callable[[], Drafts] | None = None

    @classmethod
    def chain(cls, tokens: mx.array) -> TokenTree:
        """Make the tree in which each of the tokens, int32, is the only child of the one before."""
        size = tokens.shape[0]
        return cls(tokens, *_chain(size), size, size - 1, is_chain=True)

    @classmethod
    def of(
        cls, tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float] | None = None
    ) -> TokenTree:
        """Make a tree from lists on the host: tokens and each node's parent, the root's being 0.

        The scores are natural logarithms of the proposer's probabilities of the drafts with their
        ancestors, in descending order; None if the order is another.
        """
        depths = [0] * len(tokens)
        for node in range(1, len(tokens)):
            depths[node] = depths[parents[node]] + 1
        max_depth = max(depths)
        nodes = mx.array(list(tokens), dtype=mx.int32)
        if depths == list(range(max_depth + 1)):
            tree = cls.chain(nodes)
        else:
            size, above = len(tokens), mx.array(list(parents), dtype=mx.int32)
            places = above, mx.array(depths, dtype=mx.int32), ancestor_mask(above, max_depth)
            tree = cls(nodes, *places, size, max_depth)
        if scores is None:
            return tree
        known = Drafts(list(scores), depths[1:], list(parents[1:]), list(tokens[1:]))
        return replace(tree, known=known)

    @classmethod
    def below(cls, root: mx.array, drafts: Drafts) -> TokenTree:
        """Make the tree of drafts on the host below a root, int32, shape (1,)."""
        tree = cls.of([NO_TOKEN, *drafts.tokens], [0, *drafts.parents])
        tokens = mx.concatenate([root, mx.array(drafts.tokens, dtype=mx.int32)])
        return replace(tree, tokens=tokens, known=drafts)

    @property
    def size(self) -> int:
        """Number of nodes with padding, N."""
        return self.tokens.shape[0]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Arrays to evaluate for this tree, or for any part of it."""
        if self.packed is None:
            return self.unscored_arrays
        if self.is_chain:
            return self.tokens, self.packed
        return self.tokens, self.parents, self.depths, self.packed

    @property
    def unscored_arrays(self) -> tuple[mx.array, ...]:
        """Arrays to evaluate for this tree, if nothing reads its drafts."""
        if self.is_chain:  # the arrays of `_chain` are computed already
            return (self.tokens,)
        return self.tokens, self.parents, self.depths, self.ancestors

    def read(self) -> Drafts:
        """Read the drafts of a tree with scores; blocks unless they are on the host already."""
        return self.known or self._drafts

    @cached_property
    def _drafts(self) -> Drafts:
        assert self.packed is not None
        values, count = to_ints(self.packed), self.size - 1
        if self.is_chain:
            values += [*range(count), *range(1, count + 1)]
        tokens, bits, parents, depths = (
            values[start : start + count] for start in range(0, 4 * count, count)
        )
        return Drafts(list(unpack(f"{count}f", pack(f"{count}i", *bits))), depths, parents, tokens)

    def subtree(self, drafts: Sequence[int], among: Drafts | None = None) -> TokenTree:
        """Select the root and some drafts; blocks unless the drafts are on the host already.

        ``drafts`` are indices, 0 for node 1, parents before children. ``among`` has all drafts
        below the root, if there are others than those of this tree.
        """
        if list(drafts) == list(range(len(drafts))) and among is None:
            return self.first(len(drafts) + 1)
        chosen = (among or self.read()).chosen(drafts)
        return replace(self.below(self.tokens[:1], chosen), is_chain=False)

    def first(self, num_nodes: int) -> TokenTree:
        """Return the tree of the first ``num_nodes`` nodes, which must not be padding."""
        if num_nodes == self.size:
            return self
        drafts = num_nodes - 1
        max_depth = min(self.max_depth, drafts)
        if self.is_chain:
            places = _chain(num_nodes)
        else:
            parents = self.parents[:num_nodes]
            # Computed again for few nodes, because the mask of this tree may be far larger.
            places = parents, self.depths[:num_nodes], ancestor_mask(parents, max_depth)
        return TokenTree(
            self.tokens[:num_nodes],
            *places,
            num_nodes,
            max_depth,
            known=self.known and self.known.first(drafts),
            is_chain=self.is_chain,
            find_others=self.find_others,
        )

    def padded(self, size: int) -> TokenTree:
        """Return the same tree with padding nodes up to ``size``."""
        missing = size - self.size
        if missing == 0:
            return self
        zeros = mx.zeros((missing,), dtype=mx.int32)
        parents = mx.concatenate([self.parents, zeros])
        return replace(
            self,
            tokens=mx.concatenate([self.tokens, mx.full((missing,), NO_TOKEN, dtype=mx.int32)]),
            parents=parents,
            depths=mx.concatenate([self.depths, zeros]),
            ancestors=ancestor_mask(parents, self.max_depth),
            packed=None,
            is_chain=False,
        )


@cache
def _chain(num_nodes: int) -> tuple[mx.array, mx.array, mx.array]:
    """Make the parents, depths and ancestors of a chain, which all threads share."""
    nodes = range(num_nodes)
    parents = mx.array([max(node - 1, 0) for node in nodes], dtype=mx.int32)
    ancestors = mx.array([[node >= above for above in nodes] for node in nodes])
    return parents, mx.array(list(nodes), dtype=mx.int32), ancestors


def ancestor_mask(parents: mx.array, depth: int) -> mx.array:
    """Mark every node's ancestors and itself, up to a depth, bool, shape (..., N, N).

    ``parents``, shape (..., N), are node indices, the root's 0. The result is true at [..., n, m]
    if m is n or an ancestor of n.
    """
    nodes = mx.arange(parents.shape[-1], dtype=mx.int32)
    chain = [mx.broadcast_to(nodes, parents.shape)]
    for _ in range(depth):
        chain.append(mx.take_along_axis(parents, chain[-1], axis=-1))
    return mx.any(mx.stack(chain)[..., None] == nodes, axis=0)


class TreeBatch:
    """Trees of several slots, with padding nodes up to the size of the largest tree, N, or more.

    ``drafts`` has for each slot a tree, or tokens that follow each other, int32, shape (n,).
    ``tokens`` are given if they are in one array already, int32, shape (B, N).
    """

    def __init__(
        self,
        drafts: Sequence[mx.array | TokenTree],
        size: int | None = None,
        tokens: mx.array | None = None,
    ):
        self.drafts = drafts
        self.max_depths = [
            one.max_depth if isinstance(one, TokenTree) else one.size - 1 for one in drafts
        ]
        self.size = max([one.size for one in drafts]) if size is None else size
        if tokens is not None:
            self.tokens = tokens
        self._window_rows: dict[int, mx.array] = {}

    def __len__(self) -> int:
        return len(self.drafts)

    def of(self, slots: Sequence[int]) -> TreeBatch:
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
        one = self.drafts[0]
        if len(self) == 1 and isinstance(one, TokenTree) and one.size == self.size:
            return one.ancestors[None]
        return ancestor_mask(self.parents, max(self.max_depths))

    def read_parents(self) -> list[list[int]]:
        """Read the parents of each tree's nodes; blocks unless the host knows all trees."""
        read: list[list[int]] = []
        for one in self.drafts:
            known: Sequence[int] = range(one.size - 1)
            if isinstance(one, TokenTree):
                if one.known is None:
                    return to_rows(self.parents)
                known = one.known.parents
            read.append([0, *known, *[0] * (self.size - 1 - len(known))])
        return read

    @cached_property
    def above(self) -> mx.array:
        """Ancestors of each node, without the node itself, bool, shape (B, N, N)."""
        return self.ancestors & ~mx.eye(self.size, dtype=mx.bool_)

    def window_rows(self, size: int) -> mx.array:
        """Find the inputs of a convolution over ``size`` tokens, for every node, int32, (B N, n).

        They are the last n = ``size`` rows of its branch. Each sequence has n - 1 rows of tokens
        before the root, then those of its nodes; rows count through all sequences.
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

    def _stacked(self, name: str, padding: int) -> mx.array:
        parts: list[mx.array] = []
        for one in self.drafts:
            if isinstance(one, TokenTree):
                parts.append(getattr(one, name))
            else:
                parents, depths, _ = _chain(one.size)
                parts.append({"tokens": one, "parents": parents, "depths": depths}[name])
            if missing := self.size - one.size:
                parts.append(mx.full((missing,), padding, dtype=mx.int32))
        return mx.concatenate(parts).reshape(len(self), self.size)
