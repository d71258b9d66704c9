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

from mlx_redrafter.bench.chips import Chip

# Minimum number of tokens for which MLX up to 0.30.4 used a general matrix product.
CLIFF_TOKENS = 16
# Parameters of Vicuna-7B, the model that the cliff was measured with.
CLIFF_PARAMETERS = 6.74e9


@dataclass(frozen=True)
class Parameters:
    """Parameters of the cost model; the module's docstring has the equation.

    Attributes:
        base: Factor of a plain step.
        fixed: Milliseconds per step.
        draft: Factor of reading the drafter once per level.
        row: Factor of the arithmetic of every token at the chip's peak.
        cliff: Milliseconds from 16 tokens on, for a model of 6.74B parameters. A matrix product
            too small for the GPU takes the time of its inner loop, layers times hidden size in all,
            hence it grows with the number of parameters to the power 2/3.
    """

    base: float
    fixed: float
    draft: float
    row: float
    cliff: float


# Parameters fitted by the laboratory to all three of Apple's sweeps; a test checks the values.
FITTED = Parameters(base=1.0613, fixed=3.939, draft=1.0632, row=1.1883, cliff=37.91)


@dataclass(frozen=True)
class PredictedStep:
    """A step to estimate the cost of.

    Attributes:
        chip: The chip; times were only ever fitted to chips of the M1 and M2 generations.
        plain: Milliseconds of a plain step of the same model there.
        num_parameters: Parameters of the target, P.
        drafter_share: Bytes read per level of drafting, as a share of those of a plain step.
        tokens: Tokens per forward pass, T.
        length: Beam length, L.
    """

    chip: Chip
    plain: float
    num_parameters: float
    drafter_share: float
    tokens: float
    length: int

    @property
    def arithmetic(self) -> float:
        """Milliseconds of the arithmetic at the chip's peak."""
        return self.tokens * 2 * self.num_parameters / (self.chip.teraflops * 1e9)

    @property
    def terms(self) -> list[float]:
        """Milliseconds per unit of each parameter."""
        scale = (self.num_parameters / CLIFF_PARAMETERS) ** (2 / 3)
        return [
            self.plain,
            1.0,
            (self.length - 1) * self.drafter_share * self.plain,
            self.arithmetic,
            scale if self.tokens >= CLIFF_TOKENS else 0.0,
        ]


def step_time(step: PredictedStep, parameters: Parameters) -> float:
    """Milliseconds of a step."""
    return float(np.dot(step.terms, astuple(parameters)))
