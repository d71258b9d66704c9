"""The cache of a sequence that decodes trees: one cache per layer, each of which commits itself."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_redrafter.target.caches.tree_pass import History, TreePass, UnreadPath, Visit
from mlx_redrafter.trees.tree import TokenTree, TreeBatch


class LayerCache(Protocol):
    """One layer's cache: the interface that mlx-lm models use, and the steps of a tree.

    ``stock`` is the mlx-lm cache of the K/V entries, which `trim_to` leaves as mlx-lm would.
    """

    stock: Any

    def expect(self, step: TreePass) -> None:
        """Take over the accepted path of the pass before, and prepare for the next pass."""

    def trim_to(self, length: int) -> None:
        """Leave the stock cache holding exactly the first ``length`` tokens."""

    def release(self) -> Any:
        """Give away what the cache holds, so that it is empty."""

    def hold(self, entries: Any, length: int) -> None:
        """Take what `release` gives, of ``length`` tokens; the cache must be empty."""


class TreeCache:
    """The caches of a sequence's layers, and the number of its committed tokens.

    Attributes:
        layers: The model's ``cache=`` argument.
        parts: `parts_of` the layers.
        length: Number of committed tokens.
        has_buckets: Whether trees attend to whole buckets of K/V entries.
        history: The newest passes.
        unread: Path that `follow` has committed, until `commit` gets its nodes.
        needs_notice: Whether the cache, or a copy elsewhere, must know each pass before the next.
    """

    needs_notice: ClassVar[bool] = False

    def __init__(self, layers: Sequence[Any], length: int, has_buckets: bool = False):
        self.layers = list(layers)
        self.parts = parts_of(self.layers)
        self._has_states = any(isinstance(part.stock, ArraysCache) for part in self.parts)
        self.length = length
        self.has_buckets = has_buckets
        self.history = History(1)
        self.unread: UnreadPath | None = None
        self._step = self._followed = TreePass([length])
        # Number of committed tokens before the newest pass that is committed.
        self._floor = length

    @property
    def stock(self) -> list[Any]:
        """The mlx-lm caches of the layers."""
        return [layer.stock for layer in self.layers]

    @property
    def bound(self) -> int:
        """Maximum number of tokens before the pass over the newest tree."""
        return self._step.length

    @property
    def length_on_device(self) -> mx.array:
        """Number of tokens before the pass over the newest tree, int32, shape (1,)."""
        known = mx.array([self.length], dtype=mx.int32)
        return known if self.unread is None else known + self.unread.length

    @property
    def may_move(self) -> bool:
        """Whether a batch may hold the entries as they are, now and later."""
        # Some models process the first token otherwise than one that follows a state of zeros.
        return self.length > 0 or not self._has_states

    @property
    def may_split(self) -> bool:
        """Whether chunks of any size leave the same entries."""
        return True

    def expect(self, tree: TokenTree | None) -> TreePass:
        """Make the next forward pass one over a tree, or over committed tokens."""
        bound = self.length + (0 if self.unread is None else self.unread.max_length)
        has_path = len(self._step.paths[0]) > 0
        trees = None if tree is None else TreeBatch([tree])
        self._step = TreePass([bound], trees, self.history, self.has_buckets, has_path)
        if self._has_states:  # entries need no earlier passes
            self.history.enter(self._step, [self._floor])
        self._floor = self.length
        for part in self.parts:
            part.expect(self._step)
        return self._step

    def follow(self, path: mx.array, num_accepted: mx.array) -> None:
        """Keep the nodes of a path of the tree just verified before the host has read the path.

        The next pass must be a compiled one, over a tree. Then `commit` gets the same path. The
        arrays are those of `UnreadPath`.
        """
        self._followed = self._step
        assert self._step.trees is not None
        (tree,) = self._step.trees.drafts
        assert isinstance(tree, TokenTree)
        self.unread = UnreadPath(path, num_accepted, tree.size, tree.is_chain)
        self._followed.accepted = self.unread
        self._followed.keep(self.unread.paths[0])  # `write_all_aside` writes what is not in place

    def commit(self, path: Sequence[int]) -> None:
        """Keep the nodes of ``path``, indices from the root on, of the tree just verified."""
        if self.unread is None:
            self._step.keep(path)
            self.grow(len(path))
            return
        self.unread = None
        self._followed.keep(path)
        self.grow(len(path))
        self._floor = self.length
        self._step.place(self.length)

    def grow(self, num_tokens: int) -> None:
        """Count tokens whose K/V entries the cache holds now."""
        self.length += num_tokens

    def takes(self, tree: TokenTree) -> bool:
        """Whether the nodes of a tree would attend to the same entries as in plain decoding."""
        return True

    def trim_to(self, length: int) -> None:
        """Leave the stock caches holding exactly the first ``length`` tokens.

        ``length`` may include the root of the newest tree. Safe after an interruption.
        """
        self.unread = None
        for part in self.parts:
            part.trim_to(length)
        self.length = self._floor = length
        self.history.visits = [[]]
        self._step = TreePass([length])

    def release(self) -> tuple[list[Any], list[Visit]]:
        """Give away what each part holds, and the newest passes; the newest one is committed."""
        visits, self.history.visits = self.history.visits[0], [[]]
        return [part.release() for part in self.parts], visits

    def hold(self, entries: Sequence[Any], visits: list[Visit], length: int) -> None:
        """Take what `release` gives, of ``length`` tokens."""
        self.length, self.history.visits = length, [visits if self._has_states else []]
        self._step = TreePass([length], history=self.history)
        for part, own in zip(self.parts, entries, strict=True):
            part.hold(own, length)
            part.expect(self._step)


def parts_of(caches: Iterable[Any]) -> list[Any]:
    """List caches, with the parts of a ``CacheList`` in its place."""
    parts: list[Any] = []
    for cache in caches:
        parts.extend(parts_of(cache.caches) if isinstance(cache, CacheList) else [cache])
    return parts
