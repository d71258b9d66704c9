"""Unquantised matrices, and the orders in which MLX adds up their product with one row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlx_redrafter.kernels.variant import DTYPES, MIN_OUTPUTS, MatrixShape, Variant

# Lanes and SIMD groups that share an output in most matrices.
USUAL = (32, 1)
# The same for up to FEW_INPUTS inputs.
FEW = (4, 1)
# The same for at least MANY_INPUTS inputs per output.
MANY = (32, 8)
# All orders.
ORDERS = (USUAL, FEW, MANY)
# Maximum K at which MLX lets four lanes share an output.
FEW_INPUTS = 64
# Minimum ratio of K to N at which MLX lets eight SIMD groups share an output.
MANY_INPUTS = 16


@dataclass(frozen=True)
class DenseVariant:
    """An order of additions of MLX's kernel ``gemv``.

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
        """Inputs that an output's lanes read at once; each lane reads four."""
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
        return self.dtype in DTYPES and self.outputs >= MIN_OUTPUTS

    def variants(self) -> Iterator[DenseVariant]:
        """Yield the orders that MLX's one-row kernel may use; that of 0.32.2 to 0.32.4 first."""
        first = USUAL
        if self.inputs <= FEW_INPUTS:
            first = FEW
        elif self.inputs >= MANY_INPUTS * self.outputs:
            first = MANY
        for order in dict.fromkeys((first, *ORDERS)):
            yield DenseVariant(self.dtype, *order)

    def __str__(self) -> str:
        return f"{self.outputs} x {self.inputs}, {self.dtype}"


# Variant of a kernel for quantised or unquantised matrices.
AnyVariant = Variant | DenseVariant
# Shape of a quantised or an unquantised matrix.
AnyShape = MatrixShape | DenseShape
