"""Prediction of the speed of drafting on a chip, always marked as a prediction.

Axes: W beam width, L beam length, T tokens per forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_redrafter.bench.chips import CURVES
from mlx_redrafter.bench.cost_model import (
    BANDWIDTH_SHARE,
    FITTED,
    PredictedStep,
    Question,
    step_time,
)
from mlx_redrafter.errors import ConfigError


@dataclass(frozen=True)
class ShapeAcceptance:
    """Tokens that a draft shape of W and L emits per step, of which the target verifies T."""

    width: int
    length: int
    tokens: float
    tokens_per_step: float
    name: str


# Tokens per step by W and L, measured by Apple: Vicuna-7B with Apple's drafter, float16, greedy,
# 200 tokens after one prompt. Mean over the chips of Apple's sweeps (apple/ml-recurrent-drafter,
# recurrent_drafting/mlx/experiments), which verify shared prefixes once per beam.
_APPLE_TOKENS_PER_STEP = {
    (1, 2): 1.59, (1, 3): 1.82, (1, 4): 2.15, (1, 5): 2.35,
    (2, 2): 1.74, (2, 3): 2.00, (2, 4): 2.38, (2, 5): 2.52,
    (3, 2): 1.77, (3, 3): 2.15, (3, 4): 2.42, (3, 5): 2.56,
    (4, 2): 1.80, (4, 3): 2.17, (4, 4): 2.43, (4, 5): 2.56,
}  # fmt: skip
APPLE_ACCEPTANCE = tuple(
    ShapeAcceptance(width, length, width * length, tokens, f"w{width} l{length}")
    for (width, length), tokens in _APPLE_TOKENS_PER_STEP.items()
)


@dataclass(frozen=True)
class ShapePrediction:
    """Predicted speed of a shape, also relative to plain decoding; a step is in milliseconds."""

    acceptance: ShapeAcceptance
    step: float
    tokens_per_second: float
    speedup: float


def predict(question: Question, acceptances: Sequence[ShapeAcceptance]) -> list[ShapePrediction]:
    """Predict every shape whose cost is known, fastest first.

    Raises:
        ConfigError: All trees are larger than those with known costs.
    """
    found = [
        prediction_of(question, acceptance, step)
        for acceptance in acceptances
        if (step := _step_time(question, acceptance)) is not None
    ]
    if not found:
        raise ConfigError("no verify costs are published for trees this large; give smaller shapes")
    return sorted(found, key=lambda prediction: -prediction.speedup)


def assumptions(question: Question) -> list[str]:
    """List the assumptions of the prediction, one sentence each."""
    chip, curve = question.chip, question.curve
    given = (
        "measured, according to --plain-ms"
        if question.plain is not None
        else f"predicted from {chip.bandwidth:.0f} GB/s, of which decoding reaches "
        f"{BANDWIDTH_SHARE:.0%}"
    )
    sentences = [f"A plain step costs {question.plain_step:.1f} ms: {given}."]
    if question.has_model:
        return [
            *sentences,
            "A step is predicted by a cost model fitted to Apple's sweeps of Vicuna-7B on M1 Max, "
            "M2 and M2 Ultra, measured with MLX of 2024. MLX 0.30.5 and later have other kernels "
            "for 2 to 15 tokens on these chips, probably slower; their costs are not published.",
        ]
    if curve is None:
        sentences.append(
            f"WARNING: no verify costs are published for {question.bits} bits on {chip.name} or a "
            "similar chip, so the roofline is assumed: weights are read once for all tokens, while "
            f"the GPU computes at {chip.teraflops:.1f} TFLOP/s, estimated from the cores of an M2 "
            "Max. Real kernels are slower."
        )
    elif curve in CURVES and curve.chip == chip.name:
        sentences.append(
            f"The cost of verifying, verify(T)/verify(1), was measured with {curve.source}."
        )
    else:
        sentences.append(
            f"WARNING: no verify costs are published for {question.bits} bits on {chip.name}, so "
            f"verify(T)/verify(1) is taken from the nearest chip: {curve.source}."
        )
    return [
        *sentences,
        "The costs of drafting and of the host come from the cost model for M1 and M2.",
    ]


def prediction_of(question: Question, acceptance: ShapeAcceptance, step: float) -> ShapePrediction:
    speed = acceptance.tokens_per_step / step
    return ShapePrediction(acceptance, step, 1e3 * speed, speed * question.plain_step)


def _step_time(question: Question, acceptance: ShapeAcceptance) -> float | None:
    """Predict the milliseconds of a step; None if no curve reaches so many tokens."""
    step = PredictedStep(question, acceptance.tokens, acceptance.length)
    if question.has_model:
        return step_time(step, FITTED)
    ratio = _roofline(step) if question.curve is None else question.curve.at(acceptance.tokens)
    if ratio is None:
        return None
    drafting = FITTED.draft * (acceptance.length - 1) * question.drafter_share
    return (ratio + drafting) * question.plain_step + FITTED.fixed


def _roofline(step: PredictedStep) -> float:
    """Compute verify(T) / verify(1) if weights are read once, during the arithmetic."""
    return max(1.0, step.arithmetic / step.question.plain_step)
