"""Passes over a tree that MLX compiles once for all lengths of a sequence.

The host builds the graph of a pass in a millisecond for 32 layers, and in several for a hybrid of
64. A small model's step on a GPU takes as long. A compiled graph takes a fraction of that time.
MLX compiles for fixed shapes. So the length is an array, a tree attends to a whole bucket of K/V
entries as in `few_shapes`, and buffers are inputs and outputs, which MLX updates in place.

To compile takes as long as building some tens of graphs, so a pass is compiled once it has been
used often enough. Some models need the length on the host, and a compiled graph may round in
another way than its operations. So before a model's first compiled pass, its bits are compared at
two lengths. A model that fails is not compiled. The weights are constants of a compiled pass. So
another text, or target of the model, uses its passes only if nobody has replaced weights since.

Axes: N nodes of a tree, S entries that it attends to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from operator import is_
from typing import Any, NamedTuple, Protocol, cast
from weakref import proxy

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_redrafter.checkpoint_files import named_parameters
from mlx_redrafter.errors import first_line
from mlx_redrafter.target.caches.full import FullCache, write_all_aside
from mlx_redrafter.target.caches.recurrent import RecurrentCache
from mlx_redrafter.target.caches.sliding import SlidingCache
from mlx_redrafter.target.caches.tree_cache import LayerCache, TreeCache, parts_of
from mlx_redrafter.target.caches.tree_pass import BranchedState, Layout, TreePass
from mlx_redrafter.target.few_shapes import bucket
from mlx_redrafter.target.hooks import TreePositions, UntraceableError
from mlx_redrafter.trees.tree import TokenTree, TreeBatch

# Uses of one kind of pass before it is compiled, about as many as save the time of compiling.
USES = 24
# Depths of a hybrid's trees are rounded up to a multiple of this, so that few passes are compiled.
# Further rounds of a recurrence change no bit.
DEPTHS = 4
# Maximum number of compiled passes of a model, more than the sizes and buckets of a long sequence.
MAX_COMPILED = 64

# Kinds of caches whose arrays a compiled pass can use.
LENDING = (FullCache, RecurrentCache, SlidingCache)


def waits_for_host() -> bool:
    """Whether the device waits for the host: a GPU does, while the CPU is both."""
    return mx.default_device() == mx.gpu


class TreeTarget(Protocol):
    """A target whose passes over trees can be compiled, as `Target`."""

    model: nn.Module

    def process_trees(
        self, tokens: mx.array, positions: TreePositions, caches: list[Any], layers: Sequence[int]
    ) -> Sequence[mx.array | None]: ...


class EntriesKind(NamedTuple):
    """A layer with K/V entries, as a pass is compiled for it."""

    num_entries: int  # S
    num_rows: int  # number of entries in the buffer
    start: int  # position of the buffer's first entry, as an index into those of all buffers
    window: int | None  # number of tokens in the layer's window; None without one


# Kind of a layer: an int is the number of arrays of a state, None a layer that is never used, a
# tuple has those of several caches.
LayerKind = EntriesKind | int | None | tuple[Any, ...]


class PassKind(NamedTuple):
    """The sizes, captured layers and kinds of layers that a pass is compiled for."""

    num_nodes: int
    max_depth: int
    captured: tuple[int, ...]
    layers: tuple[LayerKind, ...]


class CompiledPasses:
    """The compiled passes of one model, which its targets may share.

    Attributes:
        are_used: Whether to compile passes at all; by default if the device waits for the host.
        passes: The compiled passes, by kind.
        fault: Reason not to compile the model; None without one.
        is_first_use: Whether the newest pass was compiled, or the first of its size and bucket, for
            which a GPU's back end may build kernels.
    """

    def __init__(self, are_used: bool | None = None) -> None:
        self.are_used = waits_for_host() if are_used is None else are_used
        self.fault: str | None = None
        self.is_first_use = self._is_warming_up = False
        self.passes: dict[PassKind, _CompiledPass] = {}
        # Proxy of the target in use, which holds this object, too.
        self.target: TreeTarget | None = None
        self._uses: Counter[tuple[Any, ...]] = Counter()
        self._weights: list[mx.array] = []

    def fit(self, model: nn.Module) -> bool:
        """Return whether the model has the weights of the last call, and note them."""
        before, self._weights = self._weights, list(named_parameters(model).values())
        return len(before) == len(self._weights) and all(map(is_, before, self._weights))

    def verify(
        self, target: TreeTarget, tree: TokenTree, cache: TreeCache, captured: Sequence[int]
    ) -> list[mx.array] | None:
        """Build a target's compiled pass over a tree that the cache expects.

        A model's first one blocks until MLX has compared it with its operations. Return the outputs
        of ``process_trees``, None left out; None if no compiled pass serves.
        """
        self.target = proxy(target)
        use = _use(tree, cache, captured, cache.bound)
        self.is_first_use = use not in self._uses
        self._uses[use] += USES if self._is_warming_up else 1
        if self._uses[use] < USES or not self._serves(tree, cache):
            return None
        loan = _Loan(cache, tree)
        kind = PassKind(*use[:3], tuple(map(loan.borrow, cache.layers)))
        compiled = self.passes.get(kind) or self._compile(kind, loan)
        if compiled is None:
            return None
        results = iter(compiled.run(loan.inputs(cache.length_on_device)))
        outputs = list(islice(results, 3 if captured else 2))
        for part, returned in zip(cache.parts, compiled.returned, strict=True):
            _give_back(part, returned, results)
        return outputs

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Compile passes at their first use inside."""
        self._is_warming_up = True
        try:
            yield
        finally:
            self._is_warming_up = False

    def may_follow(
        self, tree: TokenTree, cache: TreeCache, captured: Sequence[int], max_length: int
    ) -> bool:
        """Return whether a compiled pass can process a tree before the host reads the last path.

        The arguments are those of `verify`, and the maximum number of nodes of that path.
        """
        if not self.passes or not self._serves(tree, cache):
            return False
        end = cache.length + max_length + tree.size
        windows = [one for one in cache.parts if isinstance(one, SlidingCache)]
        has_room = all(one.has_room(end) for one in windows)
        use = _use(tree, cache, captured, cache.length + max_length)
        return has_room and self._uses[use] >= USES

    def _serves(self, tree: TokenTree, cache: TreeCache) -> bool:
        """Whether a pass may be compiled. A root alone has the state that the model writes."""
        can_lend = all(type(one) in LENDING for one in cache.parts)
        return self.fault is None and tree.size > 1 and can_lend

    def _compile(self, kind: PassKind, loan: _Loan) -> _CompiledPass | None:
        """Prepare a compiled pass; None if the model has a fault."""
        self.is_first_use = True
        compiled = _CompiledPass(proxy(self), kind)
        if not self.passes:
            self.fault = compiled.find_fault(loan)
            if self.fault is not None:
                return None
        if len(self.passes) >= MAX_COMPILED:
            self.passes.pop(next(iter(self.passes)), None)  # another thread may have done so
        self.passes[kind] = compiled
        return compiled


def _use(
    tree: TokenTree, cache: TreeCache, captured: Sequence[int], length: int
) -> tuple[int, int, tuple[int, ...], int]:
    """Return what a pass is counted by: its sizes, and its bucket after ``length`` tokens."""
    max_depth = tree.size - 1
    if any(type(one) is RecurrentCache for one in cache.parts):  # else the depth plays no part
        max_depth = min(-(-tree.max_depth // DEPTHS) * DEPTHS, max_depth)
    return tree.size, max_depth, tuple(captured), bucket(length + tree.size)


class _Loan:
    """Arrays of a cache's layers, lent to a pass over a tree."""

    def __init__(self, cache: TreeCache, tree: TokenTree):
        self.arrays: list[mx.array] = []
        # Positions of the first entries of the buffers.
        self.starts: list[int] = []
        self.length = cache.bound
        self._tree = tree
        self._kinds: dict[tuple[Any, ...], EntriesKind] = {}
        unread = cache.unread
        write_all_aside(
            [one for one in cache.parts if isinstance(one, FullCache)],
            None if unread is None or unread.is_in_place else unread.nodes[0],
        )

    def borrow(self, layer: LayerCache | CacheList) -> LayerKind:
        """Borrow the arrays of a layer, and return its kind."""
        if isinstance(layer, CacheList):
            return tuple(map(self.borrow, layer.caches))
        if isinstance(layer, RecurrentCache):
            state = cast(list[mx.array], layer.stock.cache)
            self.arrays += state
            return len(state)
        assert isinstance(layer, FullCache)
        buffers = layer.lend(self._tree.size)
        if buffers is None:
            return None
        self.arrays += buffers
        window = layer.stock.max_size if isinstance(layer, SlidingCache) else None
        num_rows, start = buffers[0].shape[2], layer.start
        key = num_rows, start, window
        if key not in self._kinds:  # few, as most layers are alike
            if start not in self.starts:
                self.starts.append(start)
            num_entries = bucket(self.length + self._tree.size - start)
            place = self.starts.index(start)
            self._kinds[key] = EntriesKind(num_entries, num_rows, place, window)
        return self._kinds[key]

    def inputs(self, length: mx.array) -> list[mx.array]:
        """Return the inputs of the pass after a number of tokens, int32, shape (1,)."""
        tree = self._tree
        places = mx.concatenate([length, mx.array(self.starts, dtype=mx.int32)])
        return [places, tree.tokens, tree.parents, tree.depths, tree.ancestors, *self.arrays]


Build = Callable[[list[mx.array]], list[mx.array]]


class _CompiledPass:
    """A compiled pass, which has a proxy of those that hold it.

    Attributes:
        run: Function of `_Loan.inputs` that returns the outputs.
        returned: For each part of a layer, the number of its arrays among the outputs; for a state
            by class of what gives its arrays after a path.
    """

    def __init__(self, owner: CompiledPasses, kind: PassKind):
        self.returned: list[Any] = []
        self._build = partial(_build_pass, owner, kind, self.returned)
        self.run: Build = mx.compile(partial(_trace, owner, self._build))

    def find_fault(self, loan: _Loan) -> str | None:
        """Compare bits with those of the operations, at two lengths; None if they are equal."""
        for length in (loan.length, loan.length - 1):
            inputs = loan.inputs(mx.array([length], dtype=mx.int32))
            try:
                # Without the buffers, which MLX would copy for as long as they are lent.
                compiled, expected = (f(inputs)[:2] for f in (self.run, self._build))
            except (UntraceableError, AttributeError, RuntimeError, TypeError, ValueError) as error:
                return first_line(error)
            for found, wanted in zip(compiled, expected, strict=True):
                if not mx.array_equal(found, wanted, equal_nan=True).item():
                    return "a compiled pass rounds in another way than its operations"
        return None


def _trace(owner: CompiledPasses, build: Build, inputs: list[mx.array]) -> list[mx.array]:
    assert owner.target is not None
    return with_products(owner.target.model, build, inputs)


def with_products(model: nn.Module, build: Build, inputs: list[mx.array]) -> list[mx.array]:
    """Build a pass with a `_MatrixProduct` in place of each linear layer of the model."""
    layers = [one for one in model.modules() if type(one) is nn.Linear]
    try:
        for layer in layers:
            layer.__class__ = _MatrixProduct
        return build(inputs)
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear


class _MatrixProduct(nn.Linear):
    """A linear layer as one operation.

    mlx's layer transposes its weight, and its product of three axes by two makes MLX reshape inputs
    and outputs. Here the transposed weight is a constant of three axes.
    """

    def __call__(self, x: mx.array) -> mx.array:
        if x.ndim != 3 or x.shape[0] > 1:
            return super().__call__(x)
        matrix = self["weight"].T[None]
        mx.eval(matrix)  # without a copy
        return mx.addmm(self["bias"], x, matrix) if "bias" in self else x @ matrix


def _build_pass(
    owner: CompiledPasses, kind: PassKind, returned: list[Any], inputs: list[mx.array]
) -> list[mx.array]:
    """Build a pass of a kind from `_Loan.inputs`, and fill `_CompiledPass.returned`."""
    places, tokens, parents, depths, ancestors, *arrays = inputs
    lent = iter(arrays)
    size = kind.num_nodes
    tree = TokenTree(tokens, parents, depths, ancestors, size, kind.max_depth)
    step = TracedPass(places, tree)
    layers = [_make_layer(one, step, lent) for one in kind.layers]
    positions = TreePositions((step.length + depths)[None], None)
    # Padding nodes are embedded as token 0.
    nodes = mx.maximum(tokens, 0)[None]
    assert owner.target is not None
    found = owner.target.process_trees(nodes, positions, layers, kind.captured)
    outputs = [one for one in found if one is not None]
    returned.clear()
    records = iter(step.records)
    for part in parts_of(layers):
        if isinstance(part, RecurrentCache):
            after = next(records).after
            assert isinstance(after, BranchedState)
            returned.append([(type(one), len(list(one))) for one in after.parts])
            outputs += chain.from_iterable(after.parts)
        elif isinstance(part, TracedEntries):
            own = part.outputs()
            returned.append(len(own))
            outputs += own
        else:
            returned.append(0)  # never used
    return outputs


class TracedPass(TreePass):
    """A forward pass whose length is an array.

    ``places`` has it and the positions of the first entries of buffers, int32, (1 + buffers,).
    """

    def __init__(self, places: mx.array, tree: TokenTree):
        super().__init__([cast(Any, places[0])], TreeBatch([tree]))
        self.starts = places[:1][None]
        self._firsts = places[1:]

    def row(self, kind: EntriesKind) -> mx.array:
        """Row of the root in a buffer, int32, shape ()."""
        return self.length - self._firsts[kind.start]

    def layout_of(self, kind: EntriesKind) -> Layout:
        """Return the layout of a buffer, which is made once."""
        key = kind.num_entries, kind.start
        if key not in self._layouts:
            assert self.trees is not None
            first = self._firsts[kind.start]
            self._layouts[key] = Layout(self.trees, self.starts, kind.num_entries, first)
        return self._layouts[key]


class TracedEntries:
    """A layer with K/V entries in a compiled pass, with the interface that mlx-lm models use."""

    def __init__(self, kind: EntriesKind, step: TracedPass, keys: mx.array, values: mx.array):
        self._kind, self._step = kind, step
        self._buffers = [keys, values]
        self._fresh = [keys, values]

    @property
    def offset(self) -> int:
        return self._step.length

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        return self._step.layout_of(self._kind).window_mask(self._kind.window or window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        row, self._fresh = self._step.row(self._kind), [keys, values]
        self._buffers = [
            mx.slice_update(buffer, fresh, row, axes=(2,))
            for buffer, fresh in zip(self._buffers, self._fresh, strict=True)
        ]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        keys, values = (buffer[..., : self._kind.num_entries, :] for buffer in self._buffers)
        return keys, values

    def outputs(self) -> list[mx.array]:
        return [*self._buffers, *self._fresh]


def _make_layer(kind: LayerKind, step: TracedPass, lent: Iterator[mx.array]) -> Any:
    """Make a layer's cache of a compiled pass from its kind and the arrays lent next."""
    if isinstance(kind, EntriesKind):
        return TracedEntries(kind, step, next(lent), next(lent))
    if isinstance(kind, tuple):
        return CacheList(*[_make_layer(part, step, lent) for part in kind])
    if kind is None:
        return None
    stock = ArraysCache(kind)
    stock.cache = list(islice(lent, kind))  # type: ignore[arg-type]
    layer = RecurrentCache(stock)
    layer.expect(step)
    return layer


def _give_back(part: LayerCache, returned: Any, results: Iterator[mx.array]) -> None:
    """Give a cache the next results, as many as `_CompiledPass.returned` says."""
    if isinstance(part, RecurrentCache):
        part.branch(BranchedState([make(*islice(results, count)) for make, count in returned]))
    elif returned:
        assert isinstance(part, FullCache)
        part.take_back(*islice(results, returned))
