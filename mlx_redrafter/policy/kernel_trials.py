"""Trials of this package's kernels on the user's own weights, at load.

A kernel is used only where its results are bit for bit those of MLX's kernel for one row, and it
takes at most `MOST_TIME` of what MLX takes for as many rows. Bits are compared at every load; times
are kept.

Axes: T rows of inputs, K inputs, N outputs.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.errors import first_line
from mlx_redrafter.kernels.layers import (
    Choice,
    is_available,
    product,
    quantised_layers,
    stock_product,
    use,
)
from mlx_redrafter.kernels.small_t import ROWS, as_integers
from mlx_redrafter.kernels.variant import DTYPES, MatrixShape, Variant
from mlx_redrafter.policy.timing_cache import load_or_measure

logger = logging.getLogger(__name__)

# Environment variable that turns kernels off with "0".
SWITCH = "MLX_REDRAFTER_KERNELS"
# Most time of a kernel that is used, in times of MLX's own, so that no noise decides.
MOST_TIME = 0.95
# Rounds timed of either, in turns, after one that is not.
ROUNDS = 5
STOCK, KERNEL = "stock", "kernel"


@dataclass(frozen=True)
class Times:
    """Seconds of one product, MLX's and ours."""

    stock: float
    kernel: float


@dataclass(frozen=True)
class Trial:
    """What a trial of the kernels for one shape of matrices has shown.

    Attributes:
        shape: Shape of the matrices.
        num_layers: Layers with such a matrix.
        variant: The variant that is equal to MLX's kernel for one row; None where none is.
        times: Times by rows T; none where no variant is equal.
        error: Message of a kernel that could not be compiled or run; None where all could.
    """

    shape: MatrixShape
    num_layers: int
    variant: Variant | None
    times: dict[int, Times]
    error: str | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Values of T for which the kernel is used."""
        return tuple(
            rows for rows, times in self.times.items() if times.kernel <= MOST_TIME * times.stock
        )

    @property
    def failure(self) -> str | None:
        """What is wrong with the kernel, None where it may be used."""
        if self.error is not None:
            return self.error
        return None if self.variant else "its bits are not those of MLX's kernel for one row"


def use_kernels(model: nn.Module) -> None:
    """Let the layers of a model use kernels where these are equal and faster.

    Does nothing without an Apple GPU, or where the environment variable `SWITCH` is 0. Takes some
    seconds for the first model of its shapes on a machine.
    """
    if not is_available() or os.environ.get(SWITCH) == "0":
        return
    layers = quantised_layers(model)
    trials = [try_kernel(shape, alike) for shape, alike in layers.items()]
    failed = [trial for trial in trials if trial.failure]
    if failed:
        logger.warning(
            "MLX's kernels are used for %d of %d shapes of matrices: for %s, %s; "
            "`redrafter-mlx check --kernels` shows all",
            len(failed),
            len(trials),
            failed[0].shape,
            failed[0].failure,
        )
    for trial in trials:
        if trial.variant and trial.rows:
            for layer in layers[trial.shape]:
                use(layer, Choice(trial.shape, trial.variant, trial.rows))


def try_kernel(shape: MatrixShape, layers: Sequence[nn.Module]) -> Trial:
    """Try the variants of the kernel for layers whose matrices have one shape."""
    try:
        variant = _equal_variant(shape, layers)
        times = _known_times(shape, layers, variant) if variant else {}
    except Exception as error:  # whatever a compiler or a driver makes of it, MLX's kernels remain
        return Trial(shape, len(layers), None, {}, first_line(error))
    return Trial(shape, len(layers), variant, times)


def probe(shape: MatrixShape) -> mx.array:
    """Inputs that show differences, shape (most rows, K): outliers, zeros, subnormal numbers."""
    key = mx.random.key(0)
    x = mx.random.normal((ROWS[-1], shape.inputs), key=key)
    x[:, ::97] *= 100
    x[1, : shape.inputs // 2] = 0
    x[2] *= 1e-6
    return x.astype(DTYPES[shape.dtype])


def time_products(layers: Sequence[nn.Module], variant: Variant, x: mx.array) -> dict[str, float]:
    """Median seconds of a layer's product, by `_key`. Waits for the device.

    The layers take their turns, so that weights come from memory as they do in a model.

    Args:
        layers: Layers whose matrices have one shape.
        variant: Variant of the kernel.
        x: Inputs of shape (most rows, K).
    """
    seconds = {}
    for rows in ROWS:
        for way, found in _in_turns(layers, variant, mx.contiguous(x[:rows])).items():
            seconds[_key(way, rows)] = median(found)
    return seconds


def _in_turns(layers: Sequence[nn.Module], variant: Variant, x: mx.array) -> dict[str, list[float]]:
    """Seconds per layer of every round, MLX's and ours."""
    ways: dict[str, Callable[[nn.Module], mx.array]] = {
        STOCK: lambda layer: stock_product(layer)(x),
        KERNEL: lambda layer: product(layer, x, variant),
    }
    turns: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 + ROUNDS):
        for way, multiply in ways.items():
            start = time.perf_counter()
            mx.eval([multiply(layer) for layer in layers])
            turns[way].append((time.perf_counter() - start) / len(layers))
    return {way: found[1:] for way, found in turns.items()}


def _known_times(
    shape: MatrixShape, layers: Sequence[nn.Module], variant: Variant
) -> dict[int, Times]:
    def measure() -> dict[str, float]:
        logger.info("timing the kernel for %s, once on this machine", shape)
        return time_products(layers, variant, probe(shape))

    # The build of the system brings the compiler and the driver.
    what = "small_t", shape, variant, len(layers), platform.version()
    keys = [_key(way, rows) for rows in ROWS for way in (STOCK, KERNEL)]
    seconds = load_or_measure(what, layers[:1], keys, measure)
    return {rows: Times(seconds[_key(STOCK, rows)], seconds[_key(KERNEL, rows)]) for rows in ROWS}


def _key(way: str, rows: int) -> str:
    return f"{way} {rows}"


def _equal_variant(shape: MatrixShape, layers: Sequence[nn.Module]) -> Variant | None:
    """The first variant whose bits are stock's in the first and the last layer, for all T."""
    x = probe(shape)
    ends = {id(layer): layer for layer in (layers[0], layers[-1])}.values()
    expected = [(layer, _one_by_one(layer, x)) for layer in ends]
    for variant in shape.variants():
        same = [
            mx.all(as_integers(product(layer, x[:rows], variant)) == as_integers(y[:rows]))
            for layer, y in expected
            for rows in ROWS
        ]
        if mx.all(mx.stack(same)).item():
            return variant
    return None


def _one_by_one(layer: nn.Module, x: mx.array) -> mx.array:
    stock = stock_product(layer)
    return mx.concatenate([stock(x[row : row + 1]) for row in range(x.shape[0])])
