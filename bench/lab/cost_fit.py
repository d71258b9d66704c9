"""Fit of the cost model's parameters to measured steps.

Bayesian linear regression on relative errors moves the parameters from theory towards the
measurements, whose errors are assumed to be a tenth.
"""

import itertools
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import numpy.typing as npt

from mlx_redrafter.bench.cost_model import Parameters, Question

# Relative error allowed for a chip as a whole. It weighs measurements against theory.
DISCREPANCY = 0.1
# Parameters by theory; the docstring of `cost_model` explains them.
THEORY = Parameters(base=1.0, fixed=0.0, draft=1.0, row=1.0, cliff=0.0)
# Standard deviations: the distance from theory that each parameter may have.
FREEDOM = Parameters(base=0.1, fixed=5.0, draft=0.3, row=0.5, cliff=100.0)


def fit(steps: Sequence[tuple[Question, float, int]], measured: Sequence[float]) -> Parameters:
    """Fit the parameters to the milliseconds of steps; every chip has the same weight.

    A step is its pair and chip, its tokens and its beam length.
    """
    chips = [question.chip.name for question, _, _ in steps]
    weights = [1 / np.sqrt(chips.count(name)) for name in chips]
    rows = [
        np.array(question.step_terms(tokens, length)) / time * weight
        for (question, tokens, length), time, weight in zip(steps, measured, weights, strict=True)
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
