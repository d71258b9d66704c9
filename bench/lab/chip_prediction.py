"""Tables and conclusions of predictions for a chip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from mlx_redrafter.bench.cost_model import CLIFF_PARAMETERS, Question
from mlx_redrafter.bench.predict import ShapeAcceptance, ShapePrediction, prediction_of
from mlx_redrafter.bench.result_file import read_result
from mlx_redrafter.errors import ConfigError

NOTICE = "PREDICTION, not a measurement"
# Number of parameters of Apple's drafter for Vicuna-7B.
APPLE_DRAFTER = 396e6
# Name of the prediction for drafting without any options.
DEFAULT = "default"


def default_drafter_parameters(num_parameters: float) -> float:
    """Estimate the parameters of a drafter from Apple's for Vicuna-7B.

    A drafter's matrices have the hidden size as their sides, and the square of the hidden size
    grows with the target's parameters to the power 2/3.
    """
    return APPLE_DRAFTER * (num_parameters / CLIFF_PARAMETERS) ** (2 / 3)


def predict_default(question: Question, found: Sequence[ShapePrediction]) -> ShapePrediction:
    """Predict the default as the best shape, or as plain decoding if no shape is faster.

    Args:
        question: The question.
        found: The shapes, fastest first.
    """
    best = found[0]
    if best.speedup > 1:
        return replace(best, acceptance=replace(best.acceptance, name=DEFAULT))
    return prediction_of(question, ShapeAcceptance(1, 1, 1, 1.0, DEFAULT), question.plain_step)


def conclude(found: Sequence[ShapePrediction]) -> str:
    """Write the result in a sentence.

    Args:
        found: The shapes, fastest first.
    """
    best = found[0]
    if best.speedup <= 1:
        return "No shape is predicted to pay; the default would decode plainly."
    return (
        f"The best shape is predicted to be {best.acceptance.name}, {best.speedup:.2f} times as "
        "fast as plain decoding. The default would draft about as much, depending on the text."
    )


def read_acceptances(path: Path) -> list[ShapeAcceptance]:
    """Read tokens per step from a ``sweep.json``, of its first temperature.

    Raises:
        CheckpointError: The file is not a sweep.
        ConfigError: The sweep is not finished.
    """
    result = read_result(path, "sweep")
    points = result.get("points", [])
    if not points:
        raise ConfigError(f"the sweep in {path} is not finished; finish it with --resume")
    first = points[0]["temp"]
    return [
        ShapeAcceptance(
            point["shape"]["beam_width"],
            point["shape"]["beam_length"],
            point["row"]["nodes_per_step"],
            point["row"]["tokens_per_step"],
            point["row"]["arm"],
        )
        for point in points
        if point["temp"] == first and point["row"]["tokens_per_step"]
    ]


def prediction_table(question: Question, found: Sequence[ShapePrediction]) -> Table:
    """Make a table of predicted shapes, and of decoding without drafts."""
    size = f"{question.num_parameters / 1e9:.3g}B parameters, {question.bits} bits"
    title = f"{NOTICE}: {question.chip.name}, {size}"
    columns = ("shape", "tokens verified", "tokens/step", "step, ms", "tokens/s", "speedup")
    table = Table(*columns, title=title)
    for one in found:
        shape = one.acceptance
        cells = (f"{shape.tokens:.1f}", f"{shape.tokens_per_step:.2f}", f"{one.step:.1f}")
        table.add_row(shape.name, *cells, f"{one.tokens_per_second:.1f}", f"{one.speedup:.2f}")
    plain = question.plain_step
    table.add_row("no drafting", "1", "1", f"{plain:.1f}", f"{1e3 / plain:.1f}", "1.00")
    return table
