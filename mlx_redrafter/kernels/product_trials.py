"""Trials of this package's kernels on the user's own weights, at load.

A kernel for products is used only where its results are bit for bit those of MLX's kernel for one
row, and it takes at most `MOST_TIME` of what MLX takes for as many rows. Bits are compared at every
load; times are kept. `attention_trials` has those of attention.

Axes: T rows of inputs, K inputs, N outputs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.errors import first_line
from mlx_redrafter.kernels.attention_trials import AttentionTrial, try_attentions, use_tried
from mlx_redrafter.kernels.dense import AnyShape, AnyVariant
from mlx_redrafter.kernels.kernel_times import Times, known_times, time_in_turns
from mlx_redrafter.kernels.layers import (
    Choice,
    is_available,
    layers_by_shape,
    product,
    stock_product,
    use,
)
from mlx_redrafter.kernels.small_t import ROWS, as_integers
from mlx_redrafter.kernels.variant import DTYPES

logger = logging.getLogger(__name__)

# Environment variable that turns kernels off with "0".
SWITCH = "MLX_REDRAFTER_KERNELS"
# Most time of a kernel that is used, in times of MLX's own, so that no noise decides.
MOST_TIME = 0.95


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

    shape: AnyShape
    num_layers: int
    variant: AnyVariant | None
    times: dict[int, Times]
    error: str | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Values of T for which the kernel is used."""
        return tuple(rows for rows, times in self.times.items() if times.is_at_most(MOST_TIME))

    @property
    def failure(self) -> str | None:
        """What is wrong with the kernel, None where it may be used."""
        if self.error is not None:
            return self.error
        return None if self.variant else "its bits are not those of MLX's kernel for one row"

    @property
    def outcome(self) -> str:
        """Which variant is equal."""
        return f"equal: {self.variant}"


def use_kernels(model: nn.Module) -> None:
    """Let a model use kernels where these are equal, and faster or, for attention, as fast.

    Does nothing without an Apple GPU, or where the environment variable `SWITCH` is 0. Takes some
    seconds for the first model of its shapes on a machine.
    """
    if not is_available() or os.environ.get(SWITCH) == "0":
        return
    layers = layers_by_shape(model)
    products = [try_kernel(shape, alike) for shape, alike in layers.items()]
    attentions = try_attentions(model)
    trials: list[Trial | AttentionTrial] = [*products, *attentions]
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
    for trial in products:
        if trial.variant and trial.rows:
            for layer in layers[trial.shape]:
                use(layer, Choice(trial.shape, trial.variant, trial.rows))
    use_tried(model, attentions)


def try_kernel(shape: AnyShape, layers: Sequence[nn.Module]) -> Trial:
    """Try the variants of the kernel for layers whose matrices have one shape."""
    try:
        variant = _equal_variant(shape, layers)
        times = _known_times(shape, layers, variant) if variant else {}
    except Exception as error:  # whatever a compiler or a driver makes of it, MLX's kernels remain
        return Trial(shape, len(layers), None, {}, first_line(error))
    return Trial(shape, len(layers), variant, times)


def probe(shape: AnyShape) -> mx.array:
    """Inputs that show differences, shape (most rows, K): outliers, zeros, subnormal numbers."""
    key = mx.random.key(0)
    x = mx.random.normal((ROWS[-1], shape.inputs), key=key)
    x[:, ::97] *= 100
    x[1, : shape.inputs // 2] = 0
    x[2] *= 1e-6
    return x.astype(DTYPES[shape.dtype])


def time_product(layers: Sequence[nn.Module], variant: AnyVariant, x: mx.array) -> Times:
    """Times of a layer's product. Waits for the device.

    The layers take their turns, so that weights come from memory as they do in a model.

    Args:
        layers: Layers whose matrices have one shape.
        variant: AnyVariant of the kernel.
        x: Inputs of shape (T, K).
    """
    return time_in_turns(
        lambda: [stock_product(layer)(x) for layer in layers],
        lambda: [product(layer, x, variant) for layer in layers],
    )


def _known_times(
    shape: AnyShape, layers: Sequence[nn.Module], variant: AnyVariant
) -> dict[int, Times]:
    def measure(rows: int) -> Times:
        return time_product(layers, variant, mx.contiguous(probe(shape)[:rows]))

    return known_times(shape, ("small_t", variant, len(layers)), layers[:1], measure)


def _equal_variant(shape: AnyShape, layers: Sequence[nn.Module]) -> AnyVariant | None:
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
