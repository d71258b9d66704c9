"""Trials of this package's kernels on a model at load, and the use of those that qualify.

`small_t` qualifies if its bits are those of MLX's kernel for one row of the model's matrices.
`tree_attention` needs the bits of MLX's attention for one token whose cache is a node's path. A
trial compares bits every time, and times the kernels once per machine.

Axes: T rows of inputs or nodes of a tree, K inputs, N outputs, S committed tokens, D head size.
"""

import logging
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.errors import first_line
from mlx_redrafter.kernels.attention import (
    AttentionChoice,
    AttentionShape,
    attention_shapes,
    use_attention,
)
from mlx_redrafter.kernels.layers import (
    ProductChoice,
    is_available,
    layers_by_shape,
    product,
    stock_product,
    use_product,
)
from mlx_redrafter.kernels.small_t import ROWS, as_integers
from mlx_redrafter.kernels.tree_attention import tree_attention
from mlx_redrafter.kernels.variant import DTYPES, AnyShape, AnyVariant
from mlx_redrafter.measured import load_or_time
from mlx_redrafter.trees.tree import ancestor_mask

logger = logging.getLogger(__name__)

# Timed rounds of each kernel, interleaved, after one round that is not timed.
ROUNDS = 5
# Parents in a tree with branches whose nodes stand apart from their parents.
PARENTS = (0, 0, 0, 1, 2, 3, 3, 5, 4, 7, 7, 0, 6, 11, 9, 14)
# Maximum numbers of keys that MLX reads in one pass: if heads share keys, and on Max and Ultra
# chips. For more keys MLX divides them by other rules.
MAX_KEYS = (4095, 1023)
# Committed tokens of two short comparisons: less than one key per SIMD group, and a few of them.
FEW_KEYS = (5, 200)
# Environment variable that turns kernels off with "0".
SWITCH = "MLX_REDRAFTER_KERNELS"

Results = Callable[[], list[mx.array]]
Equal = TypeVar("Equal")


@dataclass(frozen=True)
class Times:
    """Seconds per result of MLX's kernel (``stock``) and of this package's."""

    stock: float
    kernel: float


class KernelTrial(ABC, Generic[Equal]):
    """A trial of the kernel for one shape of matrices or of attention, run by its constructor.

    Attributes:
        num_layers: Number of layers with the shape.
        equal: Variant or range with the bits of MLX's kernel, or None.
        times: Times by T; empty if ``equal`` is None.
        failure: Reason not to use the kernel, or None.
    """

    max_time: ClassVar[float]  # of a kernel that qualifies, as a share of the time of MLX's
    reference: ClassVar[str]  # name of the kernel of MLX whose bits count

    def __init__(self, shape: object, num_layers: int, modules: Collection[nn.Module] = ()):
        self.shape = shape
        self.num_layers = num_layers
        self.equal: Equal | None = None
        self.times: dict[int, Times] = {}
        self.failure: str | None = None
        try:
            equal = self.find_equal()
            if equal is None:
                self.failure = f"its bits are not those of {self.reference}"
            else:
                self.times = self._load_or_time(equal, modules)
            self.equal = equal
        except Exception as error:  # a compiler or a driver may raise anything
            self.failure = first_line(error)

    @abstractmethod
    def find_equal(self) -> Equal | None:
        """Find where the kernel has the bits of MLX's; blocks until MLX has computed both."""

    @abstractmethod
    def measure(self, equal: Equal, rows: int) -> Times:
        """Time both kernels for T rows; blocks until MLX has computed the results."""

    @abstractmethod
    def timing_key(self, equal: Equal) -> object:
        """Return what the times depend on beside the shape; its ``repr`` is part of a key."""

    @property
    def outcome(self) -> str:
        """Description of ``equal``."""
        return f"equal: {self.equal}"

    @property
    def rows(self) -> tuple[int, ...]:
        """Values of T at which the kernel takes at most ``max_time`` of the time of MLX's."""
        return tuple(
            rows
            for rows, times in self.times.items()
            if times.kernel <= self.max_time * times.stock
        )

    def _load_or_time(self, equal: Equal, modules: Collection[nn.Module]) -> dict[int, Times]:
        def time_round() -> list[dict[str, float]]:
            logger.info("timing the kernel for %s, once on this machine", self.shape)
            seconds: dict[str, float] = {}
            for rows in ROWS:
                times = self.measure(equal, rows)
                seconds |= {f"stock {rows}": times.stock, f"kernel {rows}": times.kernel}
            return [seconds]

        # The build of the system stands for its compiler and its driver.
        key = self.shape, self.timing_key(equal), platform.version()
        names = [f"{kernel} {rows}" for rows in ROWS for kernel in ("stock", "kernel")]
        (seconds,) = load_or_time(key, modules, names, lambda rounds: False, time_round)
        return {rows: Times(seconds[f"stock {rows}"], seconds[f"kernel {rows}"]) for rows in ROWS}


def time_interleaved(stock: Results, kernel: Results) -> Times:
    """Return the median seconds per result; blocks until MLX has computed the results."""
    rounds = [(_seconds(stock), _seconds(kernel)) for _ in range(1 + ROUNDS)]
    return Times(*(median(seconds) for seconds in zip(*rounds[1:], strict=True)))


def _seconds(build: Results) -> float:
    start = time.perf_counter()
    results = build()
    mx.eval(results)
    return (time.perf_counter() - start) / len(results)


class ProductTrial(KernelTrial[AnyVariant]):
    """A trial of the kernel's variants for layers whose matrices have one shape."""

    max_time = 0.95  # less than 1, so that timing noise does not decide
    reference = "MLX's kernel for one row"
    shape: AnyShape

    def __init__(self, shape: AnyShape, layers: Sequence[nn.Module]):
        self._layers = layers
        self._inputs = _random_inputs(shape)
        super().__init__(shape, len(layers), layers[:1])

    def find_equal(self) -> AnyVariant | None:
        """Return the first variant with MLX's bits in the first and the last layer, for all T."""
        x = self._inputs
        ends = {id(layer): layer for layer in (self._layers[0], self._layers[-1])}.values()
        expected = [
            (layer, mx.concatenate([stock_product(layer)(row[None]) for row in x]))
            for layer in ends
        ]
        for variant in self.shape.variants():
            same = [
                mx.all(as_integers(product(layer, x[:rows], variant)) == as_integers(y[:rows]))
                for layer, y in expected
                for rows in ROWS
            ]
            if mx.all(mx.stack(same)).item():
                return variant
        return None

    def measure(self, equal: AnyVariant, rows: int) -> Times:
        x = mx.contiguous(self._inputs[:rows])
        # Each round multiplies with every layer, so that weights come from memory as in a model.
        return time_interleaved(
            lambda: [stock_product(layer)(x) for layer in self._layers],
            lambda: [product(layer, x, equal) for layer in self._layers],
        )

    def timing_key(self, equal: AnyVariant) -> object:
        return "small_t", equal, self.num_layers

    def use(self) -> None:
        """Let the layers use the kernel for the rows at which it is faster."""
        if self.equal and self.rows:
            for layer in self._layers:
                use_product(layer, ProductChoice(self.shape, self.equal, self.rows))


def _random_inputs(shape: AnyShape) -> mx.array:
    """Make inputs of shape (T, K), T the last of `ROWS`, with outliers, zeros and tiny numbers."""
    x = mx.random.normal((ROWS[-1], shape.inputs), key=mx.random.key(0))
    x[:, ::97] *= 100
    x[1, : shape.inputs // 2] = 0
    x[2] *= 1e-6
    return x.astype(DTYPES[shape.dtype])


class AttentionTrial(KernelTrial[int]):
    """A trial for a shape of attention; ``equal`` is the maximum number of keys with equal bits."""

    max_time = 1.05  # 1, with a margin for timing noise
    reference = "MLX's attention for one token"
    shape: AttentionShape

    def find_equal(self) -> int | None:
        """Return the first of `MAX_KEYS` up to which the bits are equal."""
        depth = max(len(_path(node)) for node in range(len(PARENTS)))
        if not all(_is_equal(self.shape, committed) for committed in FEW_KEYS):
            return None
        return next((keys for keys in MAX_KEYS if _is_equal(self.shape, keys - depth)), None)

    def measure(self, equal: int, rows: int) -> Times:
        queries, keys, values = _random_tree(self.shape, equal - len(PARENTS))
        queries, scale = mx.contiguous(queries[:, :, :rows]), self.shape.head_size**-0.5
        parents = mx.array(PARENTS[:rows])
        committed = mx.ones((rows, equal - rows), dtype=mx.bool_)
        mask = mx.concatenate([committed, ancestor_mask(parents, rows)], axis=1)
        mx.eval(queries, keys, values, mask)
        attend = mx.fast.scaled_dot_product_attention
        return time_interleaved(
            lambda: [attend(queries, keys, values, scale=scale, mask=mask)],
            lambda: [tree_attention(queries, keys, values, parents, scale)],
        )

    def timing_key(self, equal: int) -> object:
        return "tree_attention", equal

    @property
    def outcome(self) -> str:
        return f"equal: up to {self.equal} keys"


def _random_tree(shape: AttentionShape, committed: int) -> tuple[mx.array, mx.array, mx.array]:
    """Make random queries, keys and values of the tree `PARENTS` after ``committed`` tokens.

    Queries are long, so that a few keys weigh more than all others together.
    """
    nodes, size = len(PARENTS), shape.head_size
    entries = (1, shape.key_heads, committed + nodes, size)
    queries, keys, values = (
        mx.random.normal(one, key=mx.random.key(seed)).astype(DTYPES[shape.dtype])
        for seed, one in enumerate([(1, shape.heads, nodes, size), entries, entries])
    )
    return 3 * queries, keys, values


def _is_equal(shape: AttentionShape, committed: int) -> bool:
    """Return True if every node has the bits of one token after its path; blocks."""
    queries, keys, values = _random_tree(shape, committed)
    scale = shape.head_size**-0.5
    y = tree_attention(queries, keys, values, mx.array(PARENTS), scale)
    same = []
    for node in range(len(PARENTS)):
        seen = mx.array([*range(committed), *(committed + above for above in _path(node))])
        alone = mx.fast.scaled_dot_product_attention(
            queries[:, :, node : node + 1], keys[:, :, seen], values[:, :, seen], scale=scale
        )
        same.append(mx.all(as_integers(y[:, :, node : node + 1]) == as_integers(alone)))
    return bool(mx.all(mx.stack(same)).item())


def _path(node: int) -> list[int]:
    return [0] if node == 0 else [*_path(PARENTS[node]), node]


def try_kernels(model: nn.Module) -> list[ProductTrial | AttentionTrial]:
    """Try the kernels for every shape of a model's matrices, then of its attention."""
    products = [ProductTrial(*alike) for alike in layers_by_shape(model).items()]
    attentions = [AttentionTrial(*alike) for alike in attention_shapes(model).items()]
    return [*products, *attentions]


def use_kernels(model: nn.Module) -> None:
    """Let a model use the kernels that are equal to MLX's, and faster or, for attention, as fast.

    Does nothing without an Apple GPU, or if the environment variable `SWITCH` is 0. The first model
    of its shapes on a machine costs some seconds.
    """
    if not is_available() or os.environ.get(SWITCH) == "0":
        return
    trials = try_kernels(model)
    failed = [trial for trial in trials if trial.failure]
    if failed:
        logger.warning(
            "MLX's kernels are used for %d of %d shapes: for %s, %s; "
            "`redrafter-mlx check --kernels` shows all",
            len(failed),
            len(trials),
            failed[0].shape,
            failed[0].failure,
        )
    choices = []
    for trial in trials:
        if isinstance(trial, ProductTrial):
            trial.use()
        elif trial.equal and trial.rows:
            choices.append(AttentionChoice(trial.shape, trial.equal, trial.rows))
    if choices:
        use_attention(model, choices)
