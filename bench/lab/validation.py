"""Validation of the cost model: fitted on two of Apple's chips, it predicts the third.

Apple's sweeps: Vicuna-7B and its drafter at 16 bits on M1 Max, M2 and M2 Ultra, one prompt, 200
tokens, W x L tokens per verify (shared prefixes were verified more than once).

The terms of the model were chosen with all three chips known; left out are the third chip's numbers
except its plain decoding. M2 Ultra is assumed to be the variant with 76 GPU cores; the source does
not say.

The fit is Bayesian linear regression on relative errors. It moves the parameters from theory
towards the measurements, whose errors are assumed to be a tenth.
"""

import csv
import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from mlx_redrafter.bench.chips import CHIPS, Chip
from mlx_redrafter.bench.cost_model import Parameters, Question
from mlx_redrafter.errors import CheckpointError

FOLDERS = {"m1-max": "M1 Max", "m2": "M2", "m2-ultra": "M2 Ultra"}
GENERATED = 200
TARGET_PARAMETERS = 6.74e9
# Two residual blocks of 8192 x 8192 and a head of 32000 x 8192.
DRAFTER_PARAMETERS = 2 * 8192**2 + 32000 * 8192
# Relative error allowed for a chip as a whole. It weighs measurements against theory.
DISCREPANCY = 0.1
# Parameters by theory; the docstring of `cost_model` explains them.
THEORY = Parameters(base=1.0, fixed=0.0, draft=1.0, row=1.0, cliff=0.0)
# Standard deviations: the distance from theory that each parameter may have.
FREEDOM = Parameters(base=0.1, fixed=5.0, draft=0.3, row=0.5, cliff=100.0)


@dataclass(frozen=True)
class Measured:
    """One of Apple's rows.

    Attributes:
        chip: The chip.
        dtype: "float16" or "bfloat16".
        greedy: Whether decoding was greedy.
        width: Beam width, W.
        length: Beam length, L.
        plain: Milliseconds of a plain step of the same dtype on the chip.
        time: Milliseconds of a step.
        tokens_per_step: Tokens per step of the text.
    """

    chip: Chip
    dtype: str
    greedy: bool
    width: int
    length: int
    plain: float
    time: float
    tokens_per_step: float

    @property
    def step(self) -> tuple[Question, float, int]:
        """Pair and chip, tokens and beam length, for the cost model."""
        question = Question(self.chip, TARGET_PARAMETERS, 16, DRAFTER_PARAMETERS, self.plain)
        return question, self.width * self.length, self.length

    def predict(self, parameters: Parameters) -> float:
        """Predict the milliseconds of the step."""
        question, tokens, length = self.step
        return question.step_time(tokens, length, parameters)

    @property
    def speedup(self) -> float:
        """Speed relative to plain decoding."""
        return self.tokens_per_step * self.plain / self.time

    @property
    def group(self) -> tuple[str, bool]:
        """Key of rows that share a best shape."""
        return self.dtype, self.greedy

    @property
    def shape(self) -> tuple[int, int]:
        """W and L."""
        return self.width, self.length


@dataclass(frozen=True)
class BestShape:
    """The shape that the model would choose on a chip it was not fitted on.

    Attributes:
        dtype: Dtype of the weights.
        greedy: Whether decoding was greedy.
        predicted: W and L with the best predicted speedup.
        measured: W and L with the best measured speedup.
        share: Measured speedup of the predicted shape over that of the measured one.
    """

    dtype: str
    greedy: bool
    predicted: tuple[int, int]
    measured: tuple[int, int]
    share: float


@dataclass(frozen=True)
class LeftOut:
    """Prediction of one chip from the other two.

    Attributes:
        chip: Name of the chip.
        parameters: Parameters fitted on the other two.
        errors: Predicted over measured step time, minus 1, for each row of the chip.
        best: Best shape for each dtype, greedy and sampled.
    """

    chip: str
    parameters: Parameters
    errors: list[float]
    best: list[BestShape]

    @property
    def median_error(self) -> float:
        """Median of the errors without their sign."""
        return median(abs(error) for error in self.errors)


def read_apple_sweeps(folder: Path) -> list[Measured]:
    """Read the three chips' tables.

    Raises:
        CheckpointError: A table is missing or damaged.
    """
    try:
        return [row for name in FOLDERS for row in _read_chip(folder / name, CHIPS[FOLDERS[name]])]
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"expected Apple's tables in {folder}/{{{','.join(FOLDERS)}}}: {error}"
        ) from error


def leave_one_out(rows: Sequence[Measured]) -> list[LeftOut]:
    """Predict every chip from the others and its own plain decoding."""
    return [_leave_out(name, rows) for name in FOLDERS.values()]


def fit_all(rows: Sequence[Measured]) -> Parameters:
    """Fit the parameters to all chips."""
    return fit([row.step for row in rows], [row.time for row in rows])


def tokens_per_step(
    rows: Sequence[Measured], group: tuple[str, bool]
) -> dict[tuple[int, int], float]:
    """Mean tokens per step by shape."""
    shapes = dict.fromkeys(row.shape for row in rows)
    return {
        shape: fmean(
            row.tokens_per_step for row in rows if row.shape == shape and row.group == group
        )
        for shape in shapes
    }


def _leave_out(name: str, rows: Sequence[Measured]) -> LeftOut:
    others = [row for row in rows if row.chip.name != name]
    own = [row for row in rows if row.chip.name == name]
    parameters = fit_all(others)
    return LeftOut(
        chip=name,
        parameters=parameters,
        errors=[row.predict(parameters) / row.time - 1 for row in own],
        best=[
            _best_shape(
                [row for row in own if row.group == group],
                tokens_per_step(others, group),
                parameters,
            )
            for group in dict.fromkeys(row.group for row in own)
        ],
    )


def _best_shape(
    own: Sequence[Measured], acceptance: dict[tuple[int, int], float], parameters: Parameters
) -> BestShape:
    """Find the best shape, predicted with the acceptance of the other chips, which is similar."""
    predicted = {
        row.shape: acceptance[row.shape] * row.plain / row.predict(parameters) for row in own
    }
    measured = {
        shape: median(row.speedup for row in own if row.shape == shape) for shape in predicted
    }
    chosen = max(predicted, key=lambda shape: predicted[shape])
    best = max(measured, key=lambda shape: measured[shape])
    share = measured[chosen] / measured[best]
    return BestShape(own[0].dtype, own[0].greedy, chosen, best, share)


def _read_chip(folder: Path, chip: Chip) -> list[Measured]:
    prompts: dict[str, list[float]] = {}
    plain: dict[str, list[float]] = {}
    for values in _read_table(folder / "autoregression.csv"):
        prompts.setdefault(values["dtype"], []).append(float(values["comprehension_ours"]))
        plain.setdefault(values["dtype"], []).append(float(values["generation_ours"]))
    rows = []
    for values in _read_table(folder / "recurrent_drafting.csv"):
        dtype, steps = values["dtype"], int(values["steps"])
        # The table has prompt and text together; the prompt's time is that of plain decoding.
        total = float(values["comprehension_and_generation_time"]) - median(prompts[dtype])
        rows.append(
            Measured(
                chip=chip,
                dtype=dtype.removeprefix("mlx.core."),
                greedy=values["greedy"] == "True",
                width=int(values["beam_width"]),
                length=int(values["beam_length"]),
                plain=fmean(plain[dtype]) / (GENERATED - 1),
                time=total / steps,
                tokens_per_step=GENERATED / steps,
            )
        )
    return rows


def _read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


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
