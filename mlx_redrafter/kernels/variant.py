"""Variants of the kernel: what its arithmetic depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

MODES = ("affine", "mxfp4")
BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
# Their names in Metal.
METAL_TYPES = {"float16": "float16_t", "bfloat16": "bfloat16_t", "float32": "float"}

Order = Literal["qmv_fast", "qmv"]
ORDERS: tuple[Order, Order] = ("qmv_fast", "qmv")
# Lanes of a SIMD group, and bits of a word of packed weights.
LANES, WORD = 32, 32
# Weights that MLX unpacks together: where they fill words, as many as fit into one.
PACKS = {2: 16, 3: 8, 4: 8, 5: 8, 6: 4, 8: 4}
# Input sizes, and bits, for which MLX has one-row kernels of another kind, with four lanes.
FOUR_LANES, FOUR_LANES_BITS = (64, 128), (2, 4, 8)
# MLX's own tiles; smaller matrices take another way through its kernels.
LEAST_OUTPUTS = 8


@dataclass(frozen=True)
class Variant:
    """An order of additions over weights of one format.

    Attributes:
        bits: Bits of a weight.
        group_size: Weights that share a scale and a bias.
        dtype: Name of the dtype of inputs, scales, biases and outputs.
        order: MLX's one-row kernel whose order it is: "qmv_fast" gives a lane two packs of weights
            in a row, "qmv" one; with 2 bits both give one.
        sums: Dtype in which four or eight inputs are added up: "float32" since MLX 0.32.3 or
            0.32.4, before that it was ``dtype``. With 8 bits there is no difference.
        mode: "affine", or "mxfp4", which has no biases.
    """

    bits: int
    group_size: int
    dtype: str
    order: Order = "qmv_fast"
    sums: str = "float32"
    mode: str = "affine"

    @property
    def values(self) -> int:
        """Inputs of a lane per block."""
        packs = 2 if self.order == "qmv_fast" and self.bits > 2 else 1
        return packs * PACKS[self.bits]

    @property
    def block(self) -> int:
        """Inputs of all lanes per block."""
        return LANES * self.values

    def __str__(self) -> str:
        sums = "" if self.sums == "float32" else f"_{self.sums}_sums"
        mode = f"{self.bits}_bits_{self.group_size}" if self.mode == "affine" else self.mode
        return f"{self.order}_{mode}_{self.dtype}{sums}"


@dataclass(frozen=True)
class MatrixShape:
    """Format and size of a quantised matrix of N rows and K columns.

    Attributes:
        bits: Bits of a weight.
        group_size: Weights that share a scale and a bias.
        dtype: Name of the dtype of inputs, and of affine scales and biases.
        inputs: K.
        outputs: N.
        mode: "affine", "mxfp4", or another that there is no kernel for.
    """

    bits: int
    group_size: int
    dtype: str
    inputs: int
    outputs: int
    mode: str = "affine"

    @property
    def is_offered(self) -> bool:
        """Whether there are kernels for it."""
        return (
            self.mode in MODES
            and self.bits in BITS
            and self.group_size in GROUP_SIZES
            and self.dtype in DTYPES
            and not (self.inputs in FOUR_LANES and self.bits in FOUR_LANES_BITS)
            and self.outputs >= LEAST_OUTPUTS
        )

    def variants(self) -> Iterator[Variant]:
        """What MLX's one-row kernel may be for it; the likeliest comes first."""
        own_sums = () if self.bits == 8 or self.dtype == "float32" else (self.dtype,)
        if self.mode == "mxfp4":
            own_sums = ()
        for sums in ("float32", *own_sums):
            fast, other = (
                Variant(self.bits, self.group_size, self.dtype, order, sums, self.mode)
                for order in ORDERS
            )
            if self.inputs % fast.block == 0 or self.bits == 2:
                yield fast
            if self.bits > 2:
                yield other

    def __str__(self) -> str:
        bits = f"{self.bits} bits, groups of {self.group_size}"
        kind = bits if self.mode == "affine" else self.mode
        return f"{self.outputs} x {self.inputs}, {kind}, {self.dtype}"
