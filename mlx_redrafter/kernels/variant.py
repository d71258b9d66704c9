"""Variants of the kernels for matrices: formats of weights and orders of additions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

# Modes of MLX's quantization that have a kernel.
MODES = ("affine", "mxfp4")
# Numbers of weights per scale that have a kernel.
GROUP_SIZES = (32, 64, 128)
# Dtypes of inputs and outputs that have a kernel.
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
# Names of those dtypes in Metal.
METAL_TYPES = {"float16": "float16_t", "bfloat16": "bfloat16_t", "float32": "float"}

# One-row kernels of MLX whose order of additions has a variant here.
Order = Literal["qmv_fast", "qmv"]
ORDERS: tuple[Order, Order] = ("qmv_fast", "qmv")
# Lanes of a SIMD group.
LANES = 32
# Bits of a word of packed weights.
WORD = 32
# Weights that MLX unpacks together, by the bits of a weight that have a kernel.
PACKS = {2: 16, 3: 8, 4: 8, 5: 8, 6: 4, 8: 4}
# Numbers of inputs for which MLX has other one-row kernels, with four lanes.
FOUR_LANES = (64, 128)
# Bits for which MLX has these kernels.
FOUR_LANES_BITS = (2, 4, 8)
# Outputs of MLX's tiles; for fewer outputs its kernels compute in another order.
MIN_OUTPUTS = 8
# Lanes and SIMD groups that share an output in most matrices.
USUAL = (32, 1)
# The same for up to FEW_INPUTS inputs.
FEW = (4, 1)
# The same for at least MANY_INPUTS inputs per output.
MANY = (32, 8)
# All orders of unquantised matrices.
DENSE_ORDERS = (USUAL, FEW, MANY)
# Maximum K at which MLX lets four lanes share an output.
FEW_INPUTS = 64
# Minimum ratio of K to N at which MLX lets eight SIMD groups share an output.
MANY_INPUTS = 16


@dataclass(frozen=True)
class Variant:
    """An order of additions over weights of one format."""

    bits: int  # of a weight
    group_size: int  # weights that share a scale and a bias
    dtype: str  # name of the dtype of inputs, scales, biases and outputs
    # Name of MLX's one-row kernel with this order. "qmv_fast" gives a lane two consecutive packs of
    # weights, "qmv" one. With 2 bits both give one.
    order: Order = "qmv_fast"
    mode: str = "affine"  # or "mxfp4", which has no biases

    @property
    def values(self) -> int:
        """Number of inputs per lane and block."""
        packs = 2 if self.order == "qmv_fast" and self.bits > 2 else 1
        return packs * PACKS[self.bits]

    @property
    def block(self) -> int:
        """Number of inputs of all lanes per block."""
        return LANES * self.values

    def __str__(self) -> str:
        mode = f"{self.bits}_bits_{self.group_size}" if self.mode == "affine" else self.mode
        return f"{self.order}_{mode}_{self.dtype}"


@dataclass(frozen=True)
class MatrixShape:
    """Format, as in `Variant`, and size of a quantised matrix; it has a kernel if `is_offered`."""

    bits: int
    group_size: int
    dtype: str
    inputs: int
    outputs: int
    mode: str = "affine"

    @property
    def is_offered(self) -> bool:
        return (
            self.mode in MODES
            and self.bits in PACKS
            and self.group_size in GROUP_SIZES
            and self.dtype in DTYPES
            and not (self.inputs in FOUR_LANES and self.bits in FOUR_LANES_BITS)
            and self.outputs >= MIN_OUTPUTS
        )

    def variants(self) -> Iterator[Variant]:
        """Yield the orders that MLX's one-row kernel may use, the most probable one first."""
        fast, other = (
            Variant(self.bits, self.group_size, self.dtype, order, self.mode) for order in ORDERS
        )
        if self.inputs % fast.block == 0 or self.bits == 2:
            yield fast
        if self.bits > 2:
            yield other

    def __str__(self) -> str:
        bits = f"{self.bits} bits, groups of {self.group_size}"
        kind = bits if self.mode == "affine" else self.mode
        return f"{self.outputs} x {self.inputs}, {kind}, {self.dtype}"


@dataclass(frozen=True)
class DenseVariant:
    """An order of additions of MLX's kernel ``gemv``."""

    dtype: str  # name of the dtype of inputs, weights and outputs
    lanes: int = 32  # lanes of a SIMD group that share an output
    groups: int = 1  # SIMD groups that share an output

    @property
    def block(self) -> int:
        """Inputs that an output's lanes read at once; each lane reads four."""
        return 4 * self.lanes * self.groups

    def __str__(self) -> str:
        return f"gemv_{self.lanes}_lanes_{self.groups}_groups_{self.dtype}"


@dataclass(frozen=True)
class DenseShape:
    """Size of a matrix, and name of the dtype of its weights."""

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
        for order in dict.fromkeys((first, *DENSE_ORDERS)):
            yield DenseVariant(self.dtype, *order)

    def __str__(self) -> str:
        return f"{self.outputs} x {self.inputs}, {self.dtype}"


# Variant of a kernel for quantised or unquantised matrices.
AnyVariant = Variant | DenseVariant
# Shape of a quantised or an unquantised matrix.
AnyShape = MatrixShape | DenseShape


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the name of a dtype, as in `DTYPES`."""
    return str(dtype).removeprefix("mlx.core.")
