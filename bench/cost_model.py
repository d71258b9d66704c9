"""Cost of a step on a chip, from the chip's hardware and the time of a plain step there.

For 16-bit weights on M1 and M2, with the kernels of MLX up to 0.30.4 (up to 15 tokens in one
16-row tile, 16 and more by a general matrix product):

    step = base * plain + fixed + draft * (L - 1) * drafter's share * plain
           + row * T * 2 P / FLOP/s + cliff if T >= 16

Theory says base = draft = row = 1: weights are read once per forward pass, and arithmetic runs at
the chip's peak and is not hidden. It also says fixed = cliff = 0. `FITTED` has the values that fit
Apple's measurements; the laboratory computes them (`lab/cost_fit.py`).

Axes: T tokens per forward pass, P parameters of the target, L beam length.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from mlx_redrafter.bench.chips import BYTES, WIDE_KERNELS, Chip, VerifyCurve, find_curve
from mlx_redrafter.errors import ConfigError

# Share of the bandwidth that plain decoding reaches; 0.72, 0.85 and 0.67 in Apple's sweeps.
BANDWIDTH_SHARE = 0.75
# Minimum number of tokens for which MLX up to 0.30.4 used a general matrix product.
CLIFF_TOKENS = 16
# Parameters of Vicuna-7B, the model that the cliff was measured with.
CLIFF_PARAMETERS = 6.74e9


@dataclass(frozen=True)
class Parameters:
    """Parameters of the cost model; the module's docstring has the equation.

    ``fixed`` and ``cliff`` are in milliseconds. The cliff is that of a model of 6.74B parameters: a
    matrix product too small for the GPU takes the time of its inner loop, layers times hidden size
    in all, hence it grows with the number of parameters to the power 2/3.
    """

    base: float
    fixed: float
    draft: float
    row: float
    cliff: float


# Parameters fitted by the laboratory to all three of Apple's sweeps; a test checks the values.
FITTED = Parameters(base=1.0613, fixed=3.939, draft=1.0632, row=1.1883, cliff=37.91)


@dataclass(frozen=True)
class Question:
    """A pair and a chip to predict for.

    Attributes:
        num_parameters: Parameters of the target that a token reads.
        bits: Bits of the target's weights: 32, 16, 8 or 4.
        drafter_parameters: Parameters read per level of drafting: all but embeddings.
        plain: Measured milliseconds of a plain step; None predicts them from the bandwidth.
    """

    chip: Chip
    num_parameters: float
    bits: int
    drafter_parameters: float
    plain: float | None = None

    def __post_init__(self) -> None:
        if self.bits not in BYTES:
            raise ConfigError(f"bits must be 16, 8 or 4, got {self.bits}")

    @property
    def plain_step(self) -> float:
        """Milliseconds of a plain step, measured or predicted."""
        if self.plain is not None:
            return self.plain
        return (
            self.num_parameters * BYTES[self.bits] / (BANDWIDTH_SHARE * self.chip.bandwidth * 1e6)
        )

    @property
    def drafter_share(self) -> float:
        """Bytes read per level of drafting, as a share of those of a plain step."""
        read = self.drafter_parameters * BYTES[16]
        return read / (self.num_parameters * BYTES[self.bits])

    @property
    def has_model(self) -> bool:
        """Whether the fitted cost model covers the chip."""
        return self.bits == 16 and self.chip.generation < WIDE_KERNELS

    @property
    def curve(self) -> VerifyCurve | None:
        """Published curve to use; None if the cost model or the roofline is used."""
        return None if self.has_model else find_curve(self.chip, self.bits)

    def arithmetic(self, tokens: float) -> float:
        """Milliseconds of the arithmetic of T tokens at the chip's peak."""
        return tokens * 2 * self.num_parameters / (self.chip.teraflops * 1e9)

    def step_terms(self, tokens: float, length: int) -> list[float]:
        """Milliseconds of a step over T tokens per unit of each of the `Parameters`."""
        scale = (self.num_parameters / CLIFF_PARAMETERS) ** (2 / 3)
        return [
            self.plain_step,
            1.0,
            (length - 1) * self.drafter_share * self.plain_step,
            self.arithmetic(tokens),
            scale if tokens >= CLIFF_TOKENS else 0.0,
        ]

    def step_time(self, tokens: float, length: int, parameters: Parameters = FITTED) -> float:
        """Milliseconds of a step, only ever fitted to chips of the M1 and M2 generations."""
        return float(np.dot(self.step_terms(tokens, length), astuple(parameters)))
