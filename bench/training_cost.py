"""Computed cost of training a drafter on a chip; never measured.

The target's passes are those of the cost model of predictions. The drafter's arithmetic goes by the
same share of the chip's peak, and its logits and optimiser by the bandwidth.

Axes: T tokens per forward pass, S = L - 1 unroll steps, B positions per optimiser step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_redrafter.bench.chips import CHIPS, Chip
from mlx_redrafter.bench.cost_model import Step, step_time
from mlx_redrafter.bench.model_shape import ModelShape, shape_of_family
from mlx_redrafter.bench.predict import BANDWIDTH_SHARE, FITTED, Question
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.training import DataOptions, TrainingRequest
from mlx_redrafter.training.duration import Pace, Timetable, Workload, format_time
from mlx_redrafter.training.resources import (
    COPIES_IN_MEMORY,
    COPIES_OF_LOGITS,
    PROMPT_TOKENS,
    ResourceEstimate,
    StudentSize,
    count_weights,
    estimate,
    format_bytes,
)
from mlx_redrafter.training.self_generated import BATCH_SIZE
from mlx_redrafter.training.students.student_kinds import choose_drafter_config
from mlx_redrafter.training.teacher import BATCH_SEQUENCES, LOGITS_BYTES, MAX_CHUNK_TOKENS

MILLION = 10**6
# Floating-point operations per weight and position: forward, and twice as many backward.
FORWARD, STEP = 2, 6
# Costs of a measurement with a tree and of calibration, in those of one with a chain, as timed on a
# CPU.
TREE_CHAINS, CALIBRATION_CHAINS = 2, 6
# What the table in the documentation is made of.
TABLE_MODELS = ("llama 1B", "qwen3 4B", "llama 8B")
TABLE_BITS = (4, 16)
TABLE_CHIPS = ("M1", "M1 Max", "M2", "M2 Max", "M3", "M3 Max", "M4", "M4 Max")


@dataclass(frozen=True)
class TrainingCost:
    """Cost of a run with the default options.

    Attributes:
        work: Amounts of work.
        needed: Disk and memory.
        request: The run.
        config: The drafter's shape.
        num_weights: Number of the drafter's weights.
    """

    work: Workload
    needed: ResourceEstimate
    request: TrainingRequest
    config: DrafterConfig
    num_weights: int

    @classmethod
    def of(cls, shape: ModelShape, tokens: int) -> TrainingCost:
        """The cost of a run on ``tokens`` tokens."""
        options = DataOptions(max_tokens=tokens)
        # Nothing is read or written; a run that is resumed may have begun.
        request = TrainingRequest(
            shape.name, Path("drafter"), data=[Path("texts")], data_options=options, resume=True
        )
        generated = round(options.self_generated_share * tokens)
        work = Workload.of(request, tokens - generated, generated, PROMPT_TOKENS, options.held_out)
        config = choose_drafter_config(shape.hidden_size, shape.vocab_size, request.network)
        num_weights = count_weights(Drafter(config))
        needed = estimate(work, request, shape.target_size, StudentSize(num_weights))
        return cls(work, needed, request, config, num_weights)

    def predict(self, shape: ModelShape, chip: Chip) -> Timetable:
        """The computed time on a chip."""
        return Timetable.of(self.work, self._pace(shape, chip), None)

    def _pace(self, shape: ModelShape, chip: Chip) -> Pace:
        at_once = min(MAX_CHUNK_TOKENS, LOGITS_BYTES // 4 // shape.vocab_size) // BATCH_SEQUENCES
        weights = self.num_weights
        positions = self.request.training.batch_tokens
        bandwidth = BANDWIDTH_SHARE * chip.bandwidth * 1e9
        flops = chip.teraflops * 1e12 / FITTED.row
        levels = self.request.network.beam_length - 1

        def drafting(operations: int) -> float:
            """Seconds of S unroll steps from a position; every copy of logits comes and goes."""
            logits = 2 * COPIES_OF_LOGITS * 4 * self.config.head_rows * operations / STEP
            return levels * (operations * weights / flops + logits / bandwidth)

        optimiser = 2 * COPIES_IN_MEMORY * 4 * weights / bandwidth
        chain = drafting(FORWARD)
        return Pace(
            generating=_pass_seconds(shape, chip, BATCH_SIZE) / BATCH_SIZE,
            reading=_pass_seconds(shape, chip, at_once * BATCH_SEQUENCES)
            / (at_once * BATCH_SEQUENCES),
            rollout=0.0,
            step=positions * drafting(STEP) + optimiser,
            chain=chain,
            tree=TREE_CHAINS * chain,
            calibration=CALIBRATION_CHAINS * chain,
        )


def render_table() -> str:
    """The table of training on a million tokens, as Markdown."""
    head = ["model", "bits", "drafter", "cache", "memory", *TABLE_CHIPS]
    rows = [
        _row(shape_of_family(f"{name} {bits}bit")) for name in TABLE_MODELS for bits in TABLE_BITS
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _row(shape: ModelShape) -> list[str]:
    cost = TrainingCost.of(shape, MILLION)
    needed = cost.needed
    sizes = (needed.drafter, needed.cache, needed.memory)
    times = [format_time(cost.predict(shape, CHIPS[chip]).total) for chip in TABLE_CHIPS]
    return [shape.name, str(shape.bits), *map(format_bytes, sizes), *times]


def _pass_seconds(shape: ModelShape, chip: Chip, tokens: int) -> float:
    """Seconds of a forward pass of the target over T tokens."""
    plain = Question(chip, shape.active, shape.bits, 0.0).plain_step
    return step_time(Step(chip, plain, shape.active, 0.0, tokens, 1), FITTED) / 1e3
