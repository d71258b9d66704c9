"""Caches of a model that drafts: committed rows in mlx-lm's buffers, rows of drafts aside.

Axes: W beams of a level, S committed rows, F rows of drafts, H query heads, G key heads, D head
size.

Several writes to one buffer in a graph copy it each time. So a draft writes its buffer once, with
the tokens that were accepted, while the rows of its levels stay aside and attention has two parts
under one softmax. Where a model's attention is not one call of mlx-lm's function with the rows and
the mask of its cache, both parts are joined before it, which copies one layer at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, create_attention_mask

from mlx_redrafter.target.hooks import HookPoint, TreePositions, install
from mlx_redrafter.trees.tree import TokenTree

ATTENTION = "scaled_dot_product_attention"
# Score of what a beam does not see.
UNSEEN = -1e30


class LevelMask(NamedTuple):
    """The rows that the beams of a level see.

    Attributes:
        committed: Committed rows that all of them see, bool, shape (S,).
        aside: Rows of drafts that each of them sees, bool, shape (W, F).
    """

    committed: mx.array
    aside: mx.array

    @property
    def joined(self) -> mx.array:
        """Both parts for each beam, bool, shape (W, S + F)."""
        shape = (self.aside.shape[0], self.committed.shape[0])
        return mx.concatenate([mx.broadcast_to(self.committed, shape), self.aside], axis=1)


class Descent:
    """What the beams of level after level see, and where they stand.

    Args:
        length: Committed rows, before the pass that the drafts follow.
        root: Row of the root, which the device knows, int32, shape (1,).
        num_rows: Rows in the buffers, those beyond the root being junk.
    """

    def __init__(self, length: int, root: mx.array, num_rows: int):
        self.length = length
        self.root = root
        self.num_rows = num_rows
        self._seen = mx.arange(num_rows) <= root
        self._lineage: mx.array | None = None

    def extend(
        self,
        beams: mx.array | None,
        width: int,
        depth: int | mx.array,
        deepest: int | None = None,
    ) -> tuple[LevelMask, TreePositions]:
        """The next level, each of whose rows continues a beam of the one before.

        Args:
            beams: Index of that beam, int32, shape (W,); None where it is the row's own, or the
                root.
            width: Rows of the level, W.
            depth: Depth of the level, 1 for the children of the root, or of each row, int32, shape
                (W,).
            deepest: Bound on the depth of every row; None where all have one.
        """
        own = mx.eye(width).astype(mx.bool_)
        if self._lineage is not None:
            before = self._lineage if beams is None else self._lineage[beams]
            own = mx.concatenate([before, own], axis=1)
        return self._place(own, depth, deepest)

    def take_tree(self, tree: TokenTree) -> tuple[LevelMask, TreePositions]:
        """All nodes of a tree as the first level; its root is the only child of the root here."""
        return self._place(tree.ancestors, tree.depths + 1, tree.max_depth + 1)

    def _place(
        self, lineage: mx.array, depth: int | mx.array, deepest: int | None
    ) -> tuple[LevelMask, TreePositions]:
        self._lineage = lineage
        if deepest is None:
            assert isinstance(depth, int)
            deepest = depth
        nodes = mx.broadcast_to(self.root + depth, (1, lineage.shape[0]))
        positions = TreePositions(nodes, self.length, self.num_rows - self.length + deepest)
        return LevelMask(self._seen, lineage), positions


class NextPass:
    """The forward pass to come, as all layers know it.

    Attributes:
        mask: Rows that the beams of a level see; None where committed tokens are processed.
        given: Mask that the model was given last.
    """

    def __init__(self) -> None:
        self.mask: LevelMask | None = None
        self.given: mx.array | str | None = None


class LevelLayer:
    """One layer's cache, with the interface that mlx-lm models use.

    Attributes:
        stock: The mlx-lm cache of the committed rows.
        step: The forward pass to come, shared by all layers.
        is_plain: Whether the model hands its rows and its mask on to mlx-lm's attention, and
            nothing else, as it did with committed tokens.
    """

    def __init__(self, stock: KVCache, step: NextPass):
        self.stock = stock
        self.step = step
        self.is_plain = False
        self._aside: tuple[mx.array, mx.array] | None = None
        self._given: mx.array | None = None

    @property
    def offset(self) -> int:
        """Committed rows."""
        return self.stock.offset

    def drop_levels(self) -> None:
        """Forget the rows of drafts."""
        self._aside = None

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The rows that the tokens of the next forward pass see."""
        mask = self.step.mask
        if mask is None:
            given = create_attention_mask(num_tokens, self.offset, return_array, window_size)
        else:
            given = mask.joined
        self.step.given = given
        return given

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep these rows; the rows to attend to, or those of drafts alone for two parts.

        Args:
            keys: Shape (1, G, W, D).
            values: Shape (1, G, W, D).
        """
        if self.step.mask is None:
            rows = self.stock.update_and_fetch(keys, values)
            self._given = rows[0]
            return rows
        if self._aside is not None:
            keys = mx.concatenate([self._aside[0], keys], axis=2)
            values = mx.concatenate([self._aside[1], values], axis=2)
        self._aside = keys, values
        return self._aside if self.is_plain else self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows, for layers that share this one's."""
        keys, values = self._committed()
        if self._aside is None:
            return keys, values
        return (
            mx.concatenate([keys, self._aside[0]], axis=2),
            mx.concatenate([values, self._aside[1]], axis=2),
        )

    def attend(
        self,
        call: Callable[..., mx.array],
        rows: tuple[mx.array, mx.array, mx.array],
        scale: float,
        mask: Any,
        options: dict[str, Any],
    ) -> mx.array:
        """Attention to rows of this cache: queries, keys and values."""
        if self.step.mask is None:
            no_options = not any(value is not None for value in options.values())
            self.is_plain = no_options and rows[1] is self._given and mask is self.step.given
        elif self.is_plain:
            assert self._aside is not None
            return attend_in_two_parts(
                rows[0], self._committed(), self._aside, self.step.mask, scale
            )
        return call(*rows, self, scale, mask, **options)

    def _committed(self) -> tuple[mx.array, mx.array]:
        keys, values, end = self.stock.state
        return keys[..., :end, :], values[..., :end, :]


def attend_to_levels(
    call: Callable[..., mx.array],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    **options: Any,
) -> mx.array:
    """Hook for mlx-lm's ``scaled_dot_product_attention``."""
    if isinstance(cache, LevelLayer):
        return cache.attend(call, (queries, keys, values), scale, mask, options)
    return call(queries, keys, values, cache, scale, mask, **options)


def hook_attention(network: nn.Module) -> None:
    """Let the attention of a network's layers, mlx-lm's own, work on `LevelLayer`."""
    for name in {type(module).__module__ for module in network.modules()}:
        if hasattr(sys.modules.get(name), ATTENTION):
            install(HookPoint(sys.modules[name], ATTENTION, attend_to_levels))


def attend_in_two_parts(
    queries: mx.array,
    committed: tuple[mx.array, mx.array],
    aside: tuple[mx.array, mx.array],
    mask: LevelMask,
    scale: float,
) -> mx.array:
    """Softmax attention over two sets of rows, without joining them.

    Args:
        queries: Shape (1, H, W, D).
        committed: Keys and values, shape (1, G, S, D).
        aside: Keys and values, shape (1, G, F, D).
        mask: Rows that each query sees.
        scale: Factor on the scores.

    Returns:
        The same as attention over the joined rows, shape (1, H, W, D).
    """
    _, heads, width, _ = queries.shape
    groups, num_committed = committed[0].shape[1], committed[0].shape[2]
    # Query heads of a key head stand beside the beams, as (1, G, H / G * W, D).
    shared = heads // groups
    queries = (queries * scale).reshape(1, groups, shared * width, -1)
    before = mx.where(mask.committed, queries @ committed[0].swapaxes(-1, -2), UNSEEN)
    own = mx.concatenate([mask.aside] * shared)
    after = mx.where(own, queries @ aside[0].swapaxes(-1, -2), UNSEEN)
    weights = mx.softmax(mx.concatenate([before, after], axis=-1), axis=-1, precise=True)
    mixed = weights[..., :num_committed] @ committed[1] + weights[..., num_committed:] @ aside[1]
    return mixed.reshape(1, heads, width, -1)


class LevelCache:
    """All layers of a model that drafts.

    Attributes:
        layers: The model's ``cache=`` argument.
    """

    def __init__(self, stock: Sequence[KVCache]):
        self._step = NextPass()
        self.layers = [LevelLayer(cache, self._step) for cache in stock]

    @property
    def num_rows(self) -> int:
        """Rows in the buffers, junk among them."""
        return max(layer.offset for layer in self.layers)

    def keep(self, num_rows: int) -> None:
        """Forget all but the first rows, and the rows of drafts."""
        self._step.mask = None
        for layer in self.layers:
            layer.drop_levels()
            if layer.stock.keys is not None:
                layer.stock.offset = num_rows

    def expect_level(self, mask: LevelMask) -> None:
        """Make the next forward pass one over beams that see these rows."""
        self._step.mask = mask
