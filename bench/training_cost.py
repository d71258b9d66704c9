"""Computed cost of training a drafter on a chip; never measured.

The cost model of predictions gives the cost of the target's passes. The drafter's arithmetic runs
at the same share of the chip's peak; its logits and its optimiser are limited by the bandwidth.

Axes: T tokens per forward pass, S = L - 1 unroll steps, B positions per optimiser step.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from mlx_redrafter.bench.chips import BYTES, Chip
from mlx_redrafter.bench.cost_model import BANDWIDTH_SHARE, FITTED, Question
from mlx_redrafter.bench.model_shape import ModelShape
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.training import DataOptions, TrainingRequest
from mlx_redrafter.training.duration import Pace, Timetable, Workload
from mlx_redrafter.training.initial import choose_slice
from mlx_redrafter.training.resources import (
    COPIES_IN_MEMORY,
    COPIES_OF_LOGITS,
    PROMPT_TOKENS,
    ResourceEstimate,
    TargetSize,
    count_weights,
    estimate,
)
from mlx_redrafter.training.self_generated import CACHE_STEP, ROUND_SIZE
from mlx_redrafter.training.students.student import ANCHOR_SHARE
from mlx_redrafter.training.students.student_kinds import choose_drafter_config
from mlx_redrafter.training.teacher import BATCH_SEQUENCES, chunk_tokens

# Floating-point operations of a forward pass, per weight and position.
FORWARD = 2
# The same of a forward and a backward pass.
STEP = 6
# Cost of the calibration, in evaluations, as timed on a CPU.
CALIBRATION_MEASUREMENTS = 6


@dataclass(frozen=True)
class TrainingCost:
    """Cost of a run with the default options."""

    work: Workload
    needed: ResourceEstimate
    request: TrainingRequest
    config: DrafterConfig
    num_weights: int

    @classmethod
    def of(cls, shape: ModelShape, tokens: int) -> Self:
        options = DataOptions(tokens)
        # The request only describes a run, so its folder may exist.
        request = TrainingRequest(
            shape.name, Path("drafter"), data=[Path("texts")], data_options=options, resume=True
        )
        generated = round(options.self_generated * tokens)
        work = Workload.of(request, tokens - generated, generated, PROMPT_TOKENS, options.held_out)
        network = choose_slice(request.network, shape.vocab_size, 0)
        request = replace(request, network=network)
        config = choose_drafter_config(shape.hidden_size, shape.vocab_size, network)
        num_weights = count_weights(Drafter(config))
        weights, cache = round(shape.parameters * BYTES[shape.bits]), CACHE_STEP * shape.cache_bytes
        size = TargetSize(shape.hidden_size, shape.vocab_size, weights, cache_bytes=cache)
        needed = estimate(work, size, num_weights)
        return cls(work, needed, request, config, num_weights)

    @property
    def tokens(self) -> int:
        return self.work.given + self.work.generated

    def predict(self, shape: ModelShape, chip: Chip) -> Timetable:
        at_once = BATCH_SEQUENCES * chunk_tokens(shape.vocab_size, BATCH_SEQUENCES)
        weights = self.num_weights
        positions = self.request.training.batch_tokens
        bandwidth = BANDWIDTH_SHARE * chip.bandwidth * 1e9
        flops = chip.teraflops * 1e12 / FITTED.row
        levels = self.request.network.length - 1

        def drafting(operations: int) -> float:
            """Compute the seconds of S unroll steps; each copy of logits is written and read."""
            logits = 2 * COPIES_OF_LOGITS * 4 * self.config.head_rows * operations / STEP
            return levels * (operations * weights / flops + logits / bandwidth)

        optimiser = 2 * COPIES_IN_MEMORY * 4 * weights / bandwidth
        measuring = drafting(FORWARD)
        pace = Pace(
            generating=_pass_seconds(shape, chip, ROUND_SIZE) / ROUND_SIZE,
            reading=_pass_seconds(shape, chip, at_once) / at_once,
            step=ANCHOR_SHARE * positions * drafting(STEP) + optimiser,
            measuring=measuring,
            calibration=CALIBRATION_MEASUREMENTS * measuring,
        )
        return Timetable.of(self.work, pace, None)


def _pass_seconds(shape: ModelShape, chip: Chip, tokens: int) -> float:
    return Question(chip, shape.active, shape.bits, 0.0).step_time(tokens, 1) / 1e3
