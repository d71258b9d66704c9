"""Estimate of the cost of verifying with the kernel `small_t`, from its instructions; not measured.

A GPU that reads weights at full bandwidth has a number of cycles of one lane per weight. For every
weight the kernel needs 4 cycles of the pipe that converts integers, which runs in parallel with the
others. Of the others it needs one cycle to mask the weight and one multiplication per row. The
inputs of a row need two instructions with 4 bits, one with 8, which all outputs of a tile share.
Cycles are those of M1 (philipturner/metal-benchmarks); later chips are assumed to be equal.

Axes: T rows of inputs.
"""

from __future__ import annotations

import math

from mlx_redrafter.bench.chips import BYTES, Chip
from mlx_redrafter.kernels.metal_source import MAX_ROWS, tile
from mlx_redrafter.kernels.small_t import ROWS

# Instructions that convert one weight.
CONVERSION = 4
# Instructions for an input, by the bits of weights.
INPUT = {4: 2, 8: 1}
# Time of real kernels relative to such a floor. MLX's own kernel has 1.3 to 1.6 on M1 Ultra (the
# curve of `chips`), one like `small_t` 1.24 for 4 rows on M1 Max (MTPLX's, timed by Takuyan-labs).
REALITY = 1.3
# Sentence for the notes of a prediction.
ASSUMPTION = (
    "ESTIMATE: nobody has timed this package's kernel. Where its estimate is below the published "
    "cost, verify(T) is computed from the instructions that the kernel needs per weight on M1 and "
    f"the chip's arithmetic, times {REALITY}: MLX's own kernel takes 1.3 to 1.6 times such a floor "
    "on M1 Ultra, another project's similar kernel 1.24 times for 4 tokens on M1 Max."
)


def verify_ratio(chip: Chip, bits: int, tokens: float) -> float | None:
    """Estimate verify(T) / verify(1); None if there is no kernel for so many tokens.

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
    """Compute the minimum time of one launch, relative to reading the weights."""
    bytes_per_second, operations = chip.bandwidth * 1e9, chip.teraflops * 1e12
    available = operations / 2 / (bytes_per_second / BYTES[bits])
    needed = 1 + rows * (1 + INPUT[bits] / tile(rows))
    return max(1.0, CONVERSION / available, needed / available)
