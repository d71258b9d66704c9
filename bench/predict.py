"""Prediction of the speed of drafting on a chip, always marked as a prediction.

Axes: L beam length, T tokens per forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_redrafter.bench.chips import CURVES
from mlx_redrafter.bench.cost_model import BANDWIDTH_SHARE, FITTED, Question
from mlx_redrafter.errors import ConfigError


@dataclass(frozen=True)
class ShapeAcceptance:
    """Tokens that a draft shape of beam length L emits per step; the target verifies T."""

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
    ShapeAcceptance(length, width * length, tokens, f"w{width} l{length}")
    for (width, length), tokens in _APPLE_TOKENS_PER_STEP.items()
)


@dataclass(frozen=True)
class ShapePrediction:
    """Predicted milliseconds of a shape's step, and its speed relative to plain decoding."""

    acceptance: ShapeAcceptance
    step: float
    speedup: float


def predict(question: Question, acceptances: Sequence[ShapeAcceptance]) -> list[ShapePrediction]:
    """Predict every shape whose cost is known, fastest first.

    Raises:
        ConfigError: All trees are larger than those with known costs.
    """
    found = [
        ShapePrediction(one, step, one.tokens_per_step / step * question.plain_step)
        for one in acceptances
        if (step := _step_time(question, one)) is not None
    ]
    if not found:
        raise ConfigError("no verify costs are published for trees this large; give smaller shapes")
    return sorted(found, key=lambda prediction: -prediction.speedup)


def assumptions(question: Question) -> list[str]:
    """List the assumptions of the prediction, one sentence each."""
    chip, curve = question.chip, question.curve
    sentences = [
        f"A plain step costs {question.plain_step:.1f} ms: predicted from {chip.bandwidth:.0f} "
        f"GB/s, of which decoding reaches {BANDWIDTH_SHARE:.0%}."
    ]
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


def _step_time(question: Question, acceptance: ShapeAcceptance) -> float | None:
    """Predict the milliseconds of a step; None if no curve reaches so many tokens."""
    tokens, length = acceptance.tokens, acceptance.length
    if question.has_model:
        return question.step_time(tokens, length)
    if question.curve is None:  # the roofline: weights are read once, during the arithmetic
        ratio: float | None = max(1.0, question.arithmetic(tokens) / question.plain_step)
    else:
        ratio = question.curve.at(tokens)
    if ratio is None:
        return None
    drafting = FITTED.draft * (length - 1) * question.drafter_share
    return (ratio + drafting) * question.plain_step + FITTED.fixed
