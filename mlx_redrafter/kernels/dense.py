"""Matrices that are not quantised, and the orders in which MLX multiplies them with one row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlx_redrafter.kernels.variant import DTYPES, LEAST_OUTPUTS, MatrixShape, Variant

# Lanes and SIMD groups that share an output; the usual ones, and those of few and of many inputs.
USUAL, FEW, MANY = ORDERS = ((32, 1), (4, 1), (32, 8))
# Up to this K, four lanes share an output; from this many times N on, eight SIMD groups do.
FEW_INPUTS, MANY_INPUTS = 64, 16


@dataclass(frozen=True)
class DenseVariant:
    """An order of additions: that of MLX's kernel ``gemv`` with some of its parameters.

    Attributes:
        dtype: Name of the dtype of inputs, weights and outputs.
        lanes: Lanes of a SIMD group that share an output.
        groups: SIMD groups that share an output.
    """

    dtype: str
    lanes: int = 32
    groups: int = 1

    @property
    def block(self) -> int:
        """Inputs that are read at once for an output; a lane has four."""
        return 4 * self.lanes * self.groups

    def __str__(self) -> str:
        return f"gemv_{self.lanes}_lanes_{self.groups}_groups_{self.dtype}"


@dataclass(frozen=True)
class DenseShape:
    """Size of a matrix of N rows and K columns.

    Attributes:
        dtype: Name of the dtype of the weights.
        inputs: K.
        outputs: N.
    """

    dtype: str
    inputs: int
    outputs: int

    @property
    def is_offered(self) -> bool:
        """Whether there are kernels for it."""
        return self.dtype in DTYPES and self.outputs >= LEAST_OUTPUTS

    def variants(self) -> Iterator[DenseVariant]:
        """What MLX's one-row kernel may be for it; that of MLX 0.32.2 to 0.32.4 comes first."""
        first = USUAL
        if self.inputs <= FEW_INPUTS:
            first = FEW
        elif self.inputs >= MANY_INPUTS * self.outputs:
            first = MANY
        for order in dict.fromkeys((first, *ORDERS)):
            yield DenseVariant(self.dtype, *order)

    def __str__(self) -> str:
        return f"{self.outputs} x {self.inputs}, {self.dtype}"


# Of all matrices that there are kernels for.
AnyVariant = Variant | DenseVariant
AnyShape = MatrixShape | DenseShape
