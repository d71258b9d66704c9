"""What drafting for a model, and training a drafter for it, is expected to give and to take.

Measured where the model can run, predicted for a chip otherwise.

Axes: T tokens per forward pass, L beam length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.bench.chips import BYTES, UNQUANTISED, Chip
from mlx_redrafter.bench.model_shape import ModelShape
from mlx_redrafter.bench.predict import (
    APPLE_ACCEPTANCE,
    Question,
    assumptions,
    predict,
)
from mlx_redrafter.bench.training_cost import TrainingCost
from mlx_redrafter.engine.engine import AnyDrafter
from mlx_redrafter.engine.generation import stream_generate
from mlx_redrafter.policy.profiling import step_costs
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.duration import Timetable
from mlx_redrafter.training.rehearsal import rehearse
from mlx_redrafter.training.students.student_kinds import new_student

# Tokens per forward pass whose cost is told.
TOLD = (4, 8)
TRIAL_TOKENS = 64
# The beginning of a text that nobody reads.
TIMING_PROMPT = list(range(1, 9))


@dataclass(frozen=True)
class Outlook:
    """Expectations for a model on a machine.

    Attributes:
        plain: Seconds of a plain step.
        shape: Name of the shape that a recurrent drafter would gain most with.
        speedup: Speed with it relative to plain decoding, with Apple's tokens per step.
        training: Time of training a drafter.
        notes: Assumptions and findings, one sentence each.
    """

    plain: float
    shape: str
    speedup: float
    training: Timetable
    notes: Sequence[str]


@dataclass(frozen=True)
class Trial:
    """Texts decoded with a drafter and without.

    Attributes:
        speedup: Speed relative to plain decoding.
        tokens_per_step: Tokens emitted per step.
    """

    speedup: float
    tokens_per_step: float


def predict_outlook(shape: ModelShape, chip: Chip, cost: TrainingCost) -> Outlook:
    """Predict for a chip that need not be at hand."""
    question = Question(chip, shape.active, shape.bits, cost.num_weights)
    best = predict(question, APPLE_ACCEPTANCE)[0]
    return Outlook(
        question.plain_step / 1e3,
        best.acceptance.name,
        best.speedup,
        cost.predict(shape, chip),
        ["PREDICTION, not a measurement.", *assumptions(question)],
    )


def measure_outlook(
    model: nn.Module, shape: ModelShape, cost: TrainingCost, on_stage: Callable[[int, int], None]
) -> Outlook:
    """Measure on this machine. Waits for the device.

    Args:
        model: The model.
        shape: Its sizes.
        cost: The training run to time.
        on_stage: Called with the number of stages done and of all of them.
    """
    target = Target(model)
    costs = step_costs(target, None)
    times = {1: costs.plain, **costs.verify}
    ratios = np.array(list(times.values())) / costs.plain
    drafted = cost.num_weights * BYTES[UNQUANTISED]
    level = drafted / (shape.active * BYTES[shape.bits])
    speedups = {
        one.name: one.tokens_per_step
        / (float(np.interp(one.tokens, list(times), ratios)) + (one.length - 1) * level)
        for one in APPLE_ACCEPTANCE
    }
    best = max(speedups, key=speedups.__getitem__)
    student = new_student(target, cost.request.network)
    pace = rehearse(cost.request, target, student, [TIMING_PROMPT], on_stage)
    told = ", ".join(f"checking {n} tokens takes {times[n] / costs.plain:.2f}" for n in TOLD)
    return Outlook(
        costs.plain,
        best,
        speedups[best],
        Timetable.of(cost.work, pace, None),
        [
            f"Measured here, in plain steps: {told}. A level of drafting is taken to cost "
            f"{level:.2f}, its share of the weights."
        ],
    )


def try_drafter(
    model: nn.Module, tokenizer: TokenizerWrapper, drafter: AnyDrafter, prompts: Sequence[str]
) -> Trial:
    """Decode some texts with a drafter and plainly. Waits for the device."""
    seconds = {True: 0.0, False: 0.0}
    steps = tokens = 0
    for prompt in prompts:
        for is_drafted in seconds:
            *_, last = stream_generate(
                model,
                tokenizer,
                prompt,
                drafter=drafter if is_drafted else None,
                max_tokens=TRIAL_TOKENS,
            )
            seconds[is_drafted] += last.generation_tokens / last.generation_tps
            if is_drafted:
                steps += last.steps
                tokens += last.generation_tokens - 1
    return Trial(seconds[False] / seconds[True], tokens / max(1, steps))
