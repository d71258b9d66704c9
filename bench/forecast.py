"""Forecast of a model's speed with drafting, and of the time to train a drafter for it.

The forecast is measured if the model is on this machine, and else predicted for a chip.

Axes: T tokens per forward pass, L beam length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.bench.chips import BYTES, UNQUANTISED, WIDE_KERNELS, Chip
from mlx_redrafter.bench.cost_model import (
    APPLE_ACCEPTANCE,
    Question,
    ShapeAcceptance,
    assumptions,
    predict,
)
from mlx_redrafter.bench.model_shape import ModelShape
from mlx_redrafter.bench.timing import OnProgress
from mlx_redrafter.bench.training_cost import TrainingCost
from mlx_redrafter.checkpoint_files import read_config
from mlx_redrafter.checks import as_mapping
from mlx_redrafter.engine.engine import AnyDrafter
from mlx_redrafter.engine.generation import stream_generate
from mlx_redrafter.engine.stored_costs import step_costs
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.proposers.checkpoint import SIMULATED
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.duration import Timetable
from mlx_redrafter.training.rehearsal import rehearse
from mlx_redrafter.training.students.student_kinds import new_student

# Name of the machine that a forecast was measured on.
THIS_MACHINE = "this machine"
# Sizes of a forward pass, in tokens, whose costs the notes list.
LISTED = (4, 8)
# Tokens of each text that a drafter is measured on.
TRIAL_TOKENS = 64
# Token ids of a prompt for timing; the text after it is not read.
TIMING_PROMPT = list(range(1, 9))


@dataclass(frozen=True)
class Forecast:
    """Expected speed of a model on a machine; speeds are relative to plain decoding."""

    machine: str  # name of the chip, or `THIS_MACHINE`
    cost: TrainingCost  # of a drafter for the model
    plain: float  # seconds of a plain step
    shape: str  # name of the fastest draft shape with a recurrent drafter
    speedup: float  # with that shape and Apple's tokens per step
    training: Timetable | None  # time of training a drafter; None if it was not measured
    notes: Sequence[str]  # assumptions and findings, one sentence each
    is_narrow: bool = False  # whether the chip's kernels read quantised weights once per token
    gain: float | None = None  # predicted speed with the drafter at hand, if known


@dataclass(frozen=True)
class SimulatedDrafter:
    """A drafter whose config says how many tokens per step its chains have yielded."""

    length: int  # tokens of a chain, root included
    tokens_per_step: float
    num_bytes: int

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Read the config of a folder; None if it does not say, or says what cannot be."""
        stated = as_mapping(read_config(folder).get(SIMULATED))
        length, rate = stated.get("length"), stated.get("tokens_per_step")
        if not isinstance(length, int) or not isinstance(rate, float) or not 1 < rate <= length:
            return None
        return cls(length, rate, sum(one.stat().st_size for one in folder.glob("*.safetensors")))

    def predict_gain(self, shape: ModelShape, chip: Chip) -> float | None:
        """Predict the speed relative to plain decoding; None without known verify costs."""
        question = Question(chip, shape.active, shape.bits, self.num_bytes / BYTES[UNQUANTISED])
        chain = ShapeAcceptance(self.length, self.length, self.tokens_per_step, "chain")
        try:
            return predict(question, [chain])[1]
        except ConfigError:
            return None

    def __str__(self) -> str:
        return f"chains of {self.length - 1} drafts with {self.tokens_per_step:.2f} tokens per step"


def predict_forecast(
    shape: ModelShape, chip: Chip, cost: TrainingCost, drafter: SimulatedDrafter | None = None
) -> Forecast:
    question = Question(chip, shape.active, shape.bits, cost.num_weights)
    best, speedup = predict(question, APPLE_ACCEPTANCE)
    return Forecast(
        chip.name,
        cost,
        question.plain_step / 1e3,
        best,
        speedup,
        cost.predict(shape, chip),
        ["PREDICTION, not a measurement.", *assumptions(question)],
        is_narrow=chip.generation < WIDE_KERNELS and shape.bits < UNQUANTISED,
        gain=None if drafter is None else drafter.predict_gain(shape, chip),
    )


def measure_forecast(
    model: nn.Module, shape: ModelShape, cost: TrainingCost, on_stage: OnProgress | None = None
) -> Forecast:
    """Measure on this machine, and with ``on_stage`` also rehearse training; blocks meanwhile."""
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
    training = None
    if on_stage is not None:
        student, work = new_student(target, cost.request.network), cost.work
        pace = rehearse(cost.request, target, student, [TIMING_PROMPT], work.generated, on_stage)
        training = Timetable.of(work, pace, None)
    listed = ", ".join(f"a pass over {n} tokens costs {times[n] / costs.plain:.2f}" for n in LISTED)
    note = (
        f"Measured here, in plain steps: {listed}. One level of drafting is assumed to cost "
        f"{level:.2f}, its share of the weights."
    )
    return Forecast(THIS_MACHINE, cost, costs.plain, best, speedups[best], training, [note])


def try_drafter(
    model: nn.Module, tokenizer: TokenizerWrapper, drafter: AnyDrafter, prompts: Sequence[str]
) -> float:
    """Decode some texts with a drafter and without, and return the relative speed.

    The first text is decoded once more before all, from which the program learns how much to draft.
    """
    seconds = {True: 0.0, False: 0.0}
    for number, prompt in enumerate([prompts[0], *prompts]):
        for is_drafted in seconds:
            used = drafter if is_drafted else None
            *_, last = stream_generate(
                model, tokenizer, prompt, drafter=used, max_tokens=TRIAL_TOKENS
            )
            if number:
                seconds[is_drafted] += last.generation_tokens / last.generation_tps
    return seconds[False] / seconds[True]
