"""Estimate of a verify with the kernel `small_t`, from what its instructions need; never measured.

A GPU that reads weights at full bandwidth has a number of cycles of one lane per weight. For every
weight the kernel needs 4 of the pipe that converts integers, which works beside the others, and of
these one to mask it, one multiplication per row, and for the inputs of a row two instructions with
4 bits, one with 8, which all outputs of a tile share. Cycles are those of M1
(philipturner/metal-benchmarks); later chips are taken to have the same.

Axes: T rows of inputs.
"""

from __future__ import annotations

import math

from mlx_redrafter.bench.chips import BYTES, Chip
from mlx_redrafter.kernels.metal_source import MAX_ROWS, tile
from mlx_redrafter.kernels.small_t import ROWS

CONVERSION = 4
# Instructions for an input, by the bits of weights.
INPUT = {4: 2, 8: 1}
# Real kernels take longer than such a floor: MLX's own 1.3 to 1.6 times as long on M1 Ultra (the
# curve of `chips`), one like `small_t` 1.24 times for 4 rows on M1 Max (MTPLX's, as Takuyan-labs
# timed it).
REALITY = 1.3


def verify_ratio(chip: Chip, bits: int, tokens: float) -> float | None:
    """Estimate of verify(T) / verify(1); None where there is no kernel for as many tokens.

    Args:
        chip: The chip.
        bits: Bits of the weights, 4 or 8.
        tokens: Tokens per forward pass, T.
    """
    rows = math.ceil(tokens)
    if rows not in ROWS:
        return None
    launches = -(-rows // MAX_ROWS)
    return REALITY * launches * _floor(chip, bits, -(-rows // launches))


def _floor(chip: Chip, bits: int, rows: int) -> float:
    """Time of one launch over that of reading the weights, at the least."""
    bytes_per_second, operations = chip.bandwidth * 1e9, chip.teraflops * 1e12
    available = operations / 2 / (bytes_per_second / BYTES[bits])
    needed = 1 + rows * (1 + INPUT[bits] / tile(rows))
    return max(1.0, CONVERSION / available, needed / available)
