"""Cost of a step on a chip, from the chip's hardware and the time of a plain step there.

For 16-bit weights on M1 and M2, with the kernels of MLX up to 0.30.4 (up to 15 tokens in one
16-row tile, 16 and more by a general matrix product):

    step = base * plain + fixed + draft * (L - 1) * drafter's share * plain
           + row * T * 2 P / FLOP/s + cliff if T >= 16

Theory says base = draft = row = 1 (weights are read once per forward pass, arithmetic runs at the
chip's peak and is not hidden) and fixed = cliff = 0. Bayesian linear regression on relative errors
moves the parameters from theory towards measured steps, whose errors are taken to be a tenth.

Axes: T tokens per forward pass, P parameters of the target, L beam length.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from mlx_redrafter.bench.chips import Chip

# Fewest tokens for which MLX up to 0.30.4 used a general matrix product.
CLIFF_TOKENS = 16
# Relative error allowed for a chip as a whole; weighs measurements against theory.
DISCREPANCY = 0.1
# Parameters of the model that the cliff was measured on.
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


THEORY = Parameters(base=1.0, fixed=0.0, draft=1.0, row=1.0, cliff=0.0)
# Standard deviations: how far from theory the parameters may be.
FREEDOM = Parameters(base=0.1, fixed=5.0, draft=0.3, row=0.5, cliff=100.0)


@dataclass(frozen=True)
class Step:
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


def step_time(step: Step, parameters: Parameters) -> float:
    """Milliseconds of a step."""
    return float(np.dot(step.terms, astuple(parameters)))


def fit(steps: Sequence[Step], measured: Sequence[float]) -> Parameters:
    """The most probable parameters given measured steps; every chip has the same weight.

    Args:
        steps: The steps.
        measured: Milliseconds of each step.
    """
    chips = [step.chip.name for step in steps]
    weights = [1 / np.sqrt(chips.count(name)) for name in chips]
    rows = [
        np.array(step.terms) / time * weight
        for step, time, weight in zip(steps, measured, weights, strict=True)
    ]
    pull = DISCREPANCY / np.array(astuple(FREEDOM))
    matrix = np.vstack([*rows, np.diag(pull)])
    values = np.concatenate([weights, pull * np.array(astuple(THEORY))])
    return Parameters(*(float(value) for value in _non_negative(matrix, values)))


def _non_negative(
    matrix: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Least squares with no negative unknown, by trying every subset of the few unknowns."""
    size = matrix.shape[1]
    best, least = np.zeros(size), np.inf
    for count in range(1, size + 1):
        for chosen in itertools.combinations(range(size), count):
            found, *_ = np.linalg.lstsq(matrix[:, chosen], values, rcond=None)
            error = float(np.sum((matrix[:, chosen] @ found - values) ** 2))
            if (found >= 0).all() and error < least:
                least = error
                best = np.zeros(size)
                best[list(chosen)] = found
    return best
