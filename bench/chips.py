"""Published facts about Apple's chips, for predictions: their hardware, and the cost of a verify.

Bandwidth, cores and arithmetic are Apple's figures for the largest variant of each chip; verify
curves are measurements that others published, named with each curve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mlx_redrafter.errors import ConfigError


@dataclass(frozen=True)
class Chip:
    """A chip.

    Attributes:
        name: Apple's name of the chip.
        generation: Number of the generation, 1 for M1.
        bandwidth: Memory bandwidth, GB/s; None if no figure was at hand.
        teraflops: Arithmetic of the GPU in float16 or float32; None if it is not needed.
    """

    name: str
    generation: int
    bandwidth: float | None
    teraflops: float | None = None


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("M1", 1, 68, 2.6),
        Chip("M1 Pro", 1, 200, 5.2),
        Chip("M1 Max", 1, 400, 10.4),
        Chip("M1 Ultra", 1, 800, 20.8),
        Chip("M2", 2, 100, 3.6),
        Chip("M2 Pro", 2, 200, 6.8),
        Chip("M2 Max", 2, 400, 13.6),
        Chip("M2 Ultra", 2, 800, 27.2),
        Chip("M3 Max", 3, 400),
        Chip("M3 Ultra", 3, 819),
        Chip("M4 Pro", 4, 273),
        Chip("M4 Max", 4, 546),
        Chip("M5 Max", 5, None),
    )
}


@dataclass(frozen=True)
class VerifyCurve:
    """Measured time of a forward pass over T tokens, relative to one token.

    Attributes:
        chips: Names of the chips it is used for, first the one it was measured on.
        bits: Bits of the weights.
        ratios: verify(T) / verify(1) by T.
        source: Model, chip and origin of the measurement.
    """

    chips: tuple[str, ...]
    bits: int
    ratios: Mapping[int, float]
    source: str

    def at(self, tokens: float) -> float | None:
        """Ratio for ``tokens``, linear between measurements, None beyond them."""
        if tokens > max(self.ratios):
            return None
        return float(np.interp(tokens, list(self.ratios), list(self.ratios.values())))


CURVES = (
    VerifyCurve(
        ("M1 Ultra", "M1", "M1 Pro", "M1 Max", "M2", "M2 Pro", "M2 Max", "M2 Ultra"),
        4,
        {1: 1.0, 2: 1.74, 3: 2.44, 4: 3.11, 8: 5.60},
        "a 27B model on M1 Ultra, lablup/mlxcel qwen38-mtp-m1ultra-2026-08-16",
    ),
    VerifyCurve(
        ("M3 Max",),
        4,
        {1: 1.0, 2: 1.0, 4: 1.28, 8: 2.50, 12: 3.95, 16: 3.95, 32: 3.95},
        "one 5120 x 17408 matrix on M3 Max, ml-explore/mlx #3863",
    ),
    VerifyCurve(
        ("M3 Ultra",),
        4,
        {1: 1.0, 3: 1.33, 4: 1.52, 5: 1.62, 8: 1.87, 12: 2.18},
        "whole rounds of a 12B model on M3 Ultra, its drafter included, lablup/mlxcel "
        "docs/benchmarks.md",
    ),
    VerifyCurve(
        ("M4 Pro", "M4 Max"),
        4,
        {1: 1.0, 2: 0.99, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 10: 4.5, 32: 4.5},
        "one 5120 x 17408 matrix on M4 Pro, ml-explore/mlx #3852",
    ),
    VerifyCurve(
        ("M4 Pro", "M4 Max"),
        8,
        {1: 1.0, 2: 1.05, 3: 1.05, 4: 1.10, 5: 1.14, 8: 1.71},
        "a 4B model on M4 Pro, ARahim3/mlx-dspark calibrate.py",
    ),
    VerifyCurve(
        ("M5 Max",),
        4,
        {1: 1.0, 3: 1.15, 4: 1.25, 8: 2.47},
        "a 27B model on M5 Max, lablup/mlxcel PR #1182",
    ),
)


def find_chip(name: str) -> Chip:
    """A chip by its name, in any case, with or without "Apple"."""
    wanted = name.lower().removeprefix("apple").strip()
    for chip in CHIPS.values():
        if chip.name.lower() == wanted:
            return chip
    raise ConfigError(f"expected a chip out of {', '.join(CHIPS)}, got {name!r}")


def find_curve(chip: Chip, bits: int) -> VerifyCurve:
    """The measured curve for a chip and a number of bits.

    Raises:
        ConfigError: No measurement was published.
    """
    for curve in CURVES:
        if chip.name in curve.chips and curve.bits == bits:
            return curve
    known = ", ".join(
        sorted({f"{curve.bits} bits on {name}" for curve in CURVES for name in curve.chips})
    )
    raise ConfigError(
        f"no published verify costs for {bits} bits on {chip.name}; known: {known}, and 16 bits "
        "on M1 and M2"
    )
