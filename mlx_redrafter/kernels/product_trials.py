"""Trials of `small_t` on the weights of a model.

The kernel qualifies if its bits are those of MLX's kernel for one row, and if it takes at most
`ProductTrial.max_time` of the time of MLX's kernel for as many rows.

Axes: T rows of inputs, K inputs, N outputs.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.kernels.layers import ProductChoice, product, stock_product, use_product
from mlx_redrafter.kernels.small_t import ROWS, as_integers
from mlx_redrafter.kernels.trial import KernelTrial, Times, time_interleaved
from mlx_redrafter.kernels.variant import DTYPES, AnyShape, AnyVariant


class ProductTrial(KernelTrial[AnyVariant]):
    """A trial of the kernel's variants for layers whose matrices have one shape."""

    # Maximum share of MLX's time; the margin keeps timing noise from deciding.
    max_time = 0.95
    reference = "MLX's kernel for one row"
    shape: AnyShape

    def __init__(self, shape: AnyShape, layers: Sequence[nn.Module]):
        self._layers = layers
        self._inputs = probe(shape)
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

    @property
    def outcome(self) -> str:
        return f"equal: {self.equal}"

    def use(self) -> None:
        """Let the layers use the kernel for the rows at which it is faster."""
        if self.equal and self.rows:
            for layer in self._layers:
                use_product(layer, ProductChoice(self.shape, self.equal, self.rows))


def probe(shape: AnyShape) -> mx.array:
    """Make inputs of shape (T, K), T the last of `ROWS`, with outliers, zeros and tiny numbers."""
    x = mx.random.normal((ROWS[-1], shape.inputs), key=mx.random.key(0))
    x[:, ::97] *= 100
    x[1, : shape.inputs // 2] = 0
    x[2] *= 1e-6
    return x.astype(DTYPES[shape.dtype])
