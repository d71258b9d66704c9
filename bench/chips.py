"""Published facts about Apple's chips, for predictions: hardware, and the cost of verifying.

Bandwidth, cores and the arithmetic of M1 and M2 are Apple's figures for the largest variant of each
chip (technical specifications at support.apple.com, announcements at apple.com/newsroom); verify
curves are measurements that others published, named with each curve.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mlx_redrafter.errors import ConfigError

# Bytes per weight, scales and biases of groups of 64 included.
BYTES = {32: 4.0, 16: 2.0, 8: 1.0625, 4: 0.5625}
# Bits of weights that are not quantised.
UNQUANTISED = 16
# First generation whose kernels stream weights once for several rows of 4-bit inputs.
WIDE_KERNELS = 3
# Teraflops of a core of M2 Max, for chips whose arithmetic Apple has not published.
CORE_TERAFLOPS = 13.6 / 38


@dataclass(frozen=True)
class Chip:
    """A chip: memory bandwidth in GB/s, number of GPU cores, and arithmetic of the GPU.

    ``published_teraflops`` is for float16 or float32; None from M3 on.
    """

    name: str
    generation: int
    bandwidth: float
    cores: int
    published_teraflops: float | None = None

    @property
    def teraflops(self) -> float:
        """Arithmetic of the GPU: as published, or estimated from the cores of an M2 Max."""
        return self.published_teraflops or CORE_TERAFLOPS * self.cores


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("M1", 1, 68, 8, 2.6),
        Chip("M1 Pro", 1, 200, 16, 5.2),
        Chip("M1 Max", 1, 400, 32, 10.4),
        Chip("M1 Ultra", 1, 800, 64, 20.8),
        Chip("M2", 2, 100, 10, 3.6),
        Chip("M2 Pro", 2, 200, 19, 6.8),
        Chip("M2 Max", 2, 400, 38, 13.6),
        Chip("M2 Ultra", 2, 800, 76, 27.2),
        Chip("M3", 3, 100, 10),
        Chip("M3 Pro", 3, 150, 18),
        Chip("M3 Max", 3, 400, 40),
        Chip("M3 Ultra", 3, 819, 80),
        Chip("M4", 4, 120, 10),
        Chip("M4 Pro", 4, 273, 20),
        Chip("M4 Max", 4, 546, 40),
        Chip("M5", 5, 153, 10),
        Chip("M5 Pro", 5, 307, 20),
        Chip("M5 Max", 5, 614, 40),
    )
}


@dataclass(frozen=True)
class VerifyCurve:
    """Measured time of a forward pass over T tokens, relative to one token.

    ``ratios`` are verify(T) / verify(1) by T, and ``source`` is model, chip and origin.
    """

    chip: str
    bits: int
    ratios: Mapping[int, float]
    source: str

    def at(self, tokens: float) -> float | None:
        """Interpolate the ratio for ``tokens``; None beyond the measurements."""
        if tokens > max(self.ratios):
            return None
        return float(np.interp(tokens, list(self.ratios), list(self.ratios.values())))


CURVES = (
    VerifyCurve(
        "M1 Ultra", 4, {1: 1.0, 2: 1.74, 3: 2.44, 4: 3.11, 8: 5.60},
        "a 27B model on M1 Ultra, lablup/mlxcel qwen38-mtp-m1ultra-2026-08-16",
    ),
    VerifyCurve(
        "M3 Max", 4, {1: 1.0, 2: 1.0, 4: 1.28, 8: 2.50, 12: 3.95, 16: 3.95, 32: 3.95},
        "one 5120 x 17408 matrix on M3 Max, ml-explore/mlx #3863",
    ),
    VerifyCurve(
        "M3 Ultra", 4, {1: 1.0, 3: 1.33, 4: 1.52, 5: 1.62, 8: 1.87, 12: 2.18},
        "whole rounds of a 12B model on M3 Ultra, its drafter included, lablup/mlxcel "
        "docs/benchmarks.md",
    ),
    VerifyCurve(
        "M4 Pro", 4, {1: 1.0, 2: 0.99, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 10: 4.5, 32: 4.5},
        "one 5120 x 17408 matrix on M4 Pro, ml-explore/mlx #3852",
    ),
    VerifyCurve(
        "M4 Pro", 8, {1: 1.0, 2: 1.05, 3: 1.05, 4: 1.10, 5: 1.14, 8: 1.71},
        "a 4B model on M4 Pro, ARahim3/mlx-dspark calibrate.py",
    ),
    VerifyCurve(
        "M5 Max", 4, {1: 1.0, 3: 1.15, 4: 1.25, 8: 2.47},
        "a 27B model on M5 Max, lablup/mlxcel PR #1182",
    ),
)  # fmt: skip


def find_chip(name: str) -> Chip:
    """Find a chip by its name, in any case, with or without "Apple"."""
    wanted = name.lower().removeprefix("apple").strip()
    for chip in CHIPS.values():
        if chip.name.lower() == wanted:
            return chip
    raise ConfigError(f"expected a chip out of {', '.join(CHIPS)}, got {name!r}")


def find_curve(chip: Chip, bits: int) -> VerifyCurve | None:
    """Find the curve of a chip, or else of the nearest one with the same kind of kernels.

    If no curve has these bits, one of other bits is converted: each further token needs the same
    arithmetic per weight, which is another share of the time to read the weights. None for weights
    of 16 bits, as none was published for them.
    """

    def distance(curve: VerifyCurve) -> tuple[bool, int, float]:
        other = CHIPS[curve.chip]
        generations = abs(other.generation - chip.generation)
        return curve.bits != bits, generations, abs(math.log(other.bandwidth / chip.bandwidth))

    if bits >= UNQUANTISED:
        return None
    has_wide = chip.generation >= WIDE_KERNELS
    like = [c for c in CURVES if (CHIPS[c.chip].generation >= WIDE_KERNELS) == has_wide]
    nearest = min(like, key=distance)
    if nearest.bits == bits:
        return nearest
    share = BYTES[nearest.bits] / BYTES[bits]
    ratios = {tokens: 1 + share * (ratio - 1) for tokens, ratio in nearest.ratios.items()}
    source = f"{nearest.source}, converted from {nearest.bits} bits"
    return replace(nearest, bits=bits, ratios=ratios, source=source)
