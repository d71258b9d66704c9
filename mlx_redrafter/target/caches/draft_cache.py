"""The cache of a model that drafts: it sets the K/V entries of drafts aside, level by level.

A level is one pass of the drafter over one token per beam.

Axes: W beams of a level, S committed entries, F entries of drafts, H query heads, G key heads, D
head size.

MLX copies a buffer for each of several writes in one graph. So a step writes mlx-lm's buffers once,
with the accepted tokens. The entries of drafts stay outside these buffers, and attention has two
parts under one softmax. If a model does not simply pass its entries and its mask to mlx-lm's
attention, the cache joins both parts first, which copies the entries of one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from mlx_redrafter.target.caches.full import joined
from mlx_redrafter.target.hooks import Call, TreePositions
from mlx_redrafter.trees.tree import TokenTree

# Score of an entry that a beam must not attend to.
UNSEEN = -1e30


class DraftMask(NamedTuple):
    """The entries that the beams of a level attend to.

    Attributes:
        committed: Committed entries, bool, the same for all beams, shape (S,), or for each, (W, S).
        aside: Entries of drafts for each beam, bool, shape (W, F).
        moved: Number of tokens from the root to the end of each beam's window, integer, shape
            (W, 1); 0 if windows end at the root.
    """

    committed: mx.array
    aside: mx.array
    moved: mx.array | int = 0

    def within(self, window: int | None) -> DraftMask:
        """Mask all committed entries except the last ``window`` up to a window's end.

        Entries of drafts stay, as in the training of EAGLE heads (speculators' ``eagle3``).
        """
        if window is None:
            return self
        is_near = mx.arange(self.committed.shape[0]) >= mx.sum(self.committed) + self.moved - window
        return self._replace(committed=self.committed & is_near)

    @property
    def joined(self) -> mx.array:
        """Both parts side by side, bool, shape (W, S + F)."""
        shape = (self.aside.shape[0], self.committed.shape[-1])
        return mx.concatenate([mx.broadcast_to(self.committed, shape), self.aside], axis=1)


class DraftLineage:
    """Ancestors and positions of the beams, level after level.

    ``length`` is the number of committed entries before the pass that the drafts follow. ``root``
    is the entry of the root, int32, shape (1,), which MLX may not have computed yet. Of the
    ``num_rows`` entries in the buffers, those beyond it are junk.
    """

    def __init__(self, length: int, root: mx.array, num_rows: int):
        self.length = length
        self.root = root
        self.num_rows = num_rows
        self._committed = mx.arange(num_rows) <= root
        self._ancestors: mx.array | None = None

    def extend(
        self,
        beams: mx.array | None,
        width: int,
        depth: int | mx.array,
        max_depth: int | None = None,
    ) -> tuple[DraftMask, TreePositions]:
        """Add a level, each of whose W beams continues a beam of the previous level.

        ``beams`` has the indices of these, int32, shape (W,). None if every beam continues the beam
        of its own index, or the root. ``depth`` has the edges from the root, 1 for its children: an
        int for the level, or one number per beam, int32, shape (W,), with the maximum beside it.
        """
        own = mx.eye(width).astype(mx.bool_)
        if self._ancestors is not None:
            before = self._ancestors if beams is None else self._ancestors[beams]
            before = mx.broadcast_to(before, (width, before.shape[1]))
            own = mx.concatenate([before, own], axis=1)
        return self._place(own, depth, max_depth)

    def start_at_nodes(self, tree: TokenTree) -> tuple[DraftMask, TreePositions]:
        """Add all nodes of a tree as the first level; the tree's root is a child of ``root``."""
        return self._place(tree.ancestors, tree.depths + 1, tree.max_depth + 1)

    def _place(
        self, ancestors: mx.array, depth: int | mx.array, max_depth: int | None
    ) -> tuple[DraftMask, TreePositions]:
        self._ancestors = ancestors
        if max_depth is None:
            assert isinstance(depth, int)
            max_depth = depth
        nodes = mx.broadcast_to(self.root + depth, (1, ancestors.shape[0]))
        positions = TreePositions(nodes, [range(self.length, self.num_rows + max_depth)])
        return DraftMask(self._committed, ancestors), positions


@dataclass
class NextPass:
    """The next forward pass, shared by all layers."""

    mask: DraftMask | None = None  # None for a pass over committed tokens
    # Mask that the model got last, and the number of tokens in its window; None without one.
    given: mx.array | str | None = None
    window: int | None = None


class DraftLayer:
    """One layer's cache, as mlx-lm models use it; ``stock`` has the committed entries.

    ``is_plain`` is whether the model, in its last pass over committed tokens, gave mlx-lm's
    attention the entries and the mask of the cache, and no options.
    """

    def __init__(self, stock: KVCache, step: NextPass):
        self.stock = stock
        self.step = step
        self.is_plain = False
        # Entries of the drafts so far.
        self.aside: tuple[mx.array, mx.array] | None = None
        self._given: mx.array | None = None

    @property
    def offset(self) -> int:
        return self.stock.offset

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        mask, self.step.window = self.step.mask, window_size
        if mask is None:
            given = create_attention_mask(num_tokens, self.offset, return_array, window_size)
        else:
            given = mask.within(window_size).joined
        self.step.given = given
        return given

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store entries; return those of drafts if `attend` has two parts, else all entries."""
        if self.step.mask is None:
            committed = self.stock.update_and_fetch(keys, values)
            self._given = committed[0]
            return committed
        own = keys, values
        self.aside = own if self.aside is None else joined([self.aside, own])
        return self.aside if self.is_plain else self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all entries, for layers that share those of this layer."""
        committed = self.stock.keys_and_values()
        return committed if self.aside is None else joined([committed, self.aside])

    def attend(
        self, call: Call, *arrays: mx.array, scale: float, mask: Any, **options: Any
    ) -> mx.array:
        """Compute attention to entries of this cache from queries, keys and values."""
        if self.step.mask is None:
            no_options = not any(value is not None for value in options.values())
            self.is_plain = no_options and arrays[1] is self._given and mask is self.step.given
        elif self.is_plain:
            assert self.aside is not None
            seen = self.step.mask.within(self.step.window)
            committed = self.stock.keys_and_values()
            return attend_in_two_parts(arrays[0], committed, self.aside, seen, scale)
        return call(*arrays, cache=self, scale=scale, mask=mask, **options)


def attend_to_drafts(call: Call, *arrays: mx.array, cache: Any, **options: Any) -> Any:
    """Hook for mlx-lm's attention, which lets it work on `DraftLayer`."""
    if isinstance(cache, DraftLayer):
        return cache.attend(call, *arrays, **options)
    return call(*arrays, cache=cache, **options)


def attend_in_two_parts(
    queries: mx.array,
    committed: tuple[mx.array, mx.array],
    aside: tuple[mx.array, mx.array],
    mask: DraftMask,
    scale: float,
) -> mx.array:
    """Compute softmax attention over two sets of entries without joining them.

    Queries and the result have the shape (1, H, W, D). Keys and values have the shape (1, G, S, D)
    if they are committed, and (1, G, F, D) aside. ``scale`` is the factor of the scores.
    """
    _, heads, width, _ = queries.shape
    groups, num_committed = committed[0].shape[1], committed[0].shape[2]
    # The query heads that share a key head are further beams: (1, G, H / G * W, D).
    shared = heads // groups
    queries = (queries * scale).reshape(1, groups, shared * width, -1)
    seen, own = (rows if rows.ndim == 1 else mx.concatenate([rows] * shared) for rows in mask[:2])
    before = mx.where(seen, queries @ committed[0].swapaxes(-1, -2), UNSEEN)
    after = mx.where(own, queries @ aside[0].swapaxes(-1, -2), UNSEEN)
    weights = mx.softmax(mx.concatenate([before, after], axis=-1), axis=-1, precise=True)
    mixed = weights[..., :num_committed] @ committed[1] + weights[..., num_committed:] @ aside[1]
    return mixed.reshape(1, heads, width, -1)


class DraftCache:
    """The cache of all layers of a model that drafts; ``layers`` is its ``cache=`` argument."""

    def __init__(self, stock: Sequence[KVCache]):
        self._step = NextPass()
        self.layers = [DraftLayer(cache, self._step) for cache in stock]

    @property
    def num_rows(self) -> int:
        """Number of entries in the buffers, junk included."""
        return max(layer.offset for layer in self.layers)

    def keep(self, num_rows: int) -> None:
        """Keep the first entries of the buffers only, and forget the entries of drafts."""
        self._step.mask = None
        for layer in self.layers:
            layer.aside = None
            if layer.stock.keys is not None:
                layer.stock.offset = num_rows

    def expect_drafts(self, mask: DraftMask) -> None:
        """Make the next forward pass one over beams with this mask."""
        self._step.mask = mask
