"""A rehearsal of a run: every stage on a few tokens, timed.

Axes: n tokens of the rehearsal, L beam length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import mlx.core as mx
import numpy as np

from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.batches import Group, HeadRows, gather
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.duration import Pace
from mlx_redrafter.training.request import TrainingRequest
from mlx_redrafter.training.self_generated import (
    ROUND_SIZE,
    AnswerLimits,
    GenerationJob,
    TextGenerator,
)
from mlx_redrafter.training.simulation import simulate
from mlx_redrafter.training.students.student import Student, initialise
from mlx_redrafter.training.teacher import (
    BATCH_SEQUENCES,
    ROLLOUT_POSITIONS,
    read_sequences,
    read_states,
    roll_out,
)
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training.trainer import Optimiser, stretch_of

# Most tokens of a prompt, and tokens of a short and a long answer: their difference is the time of
# writing without that of the prompts. The first tokens take longer, as fewer texts are at hand:
# prompts are read between them.
PROMPT_TOKENS, SHORT, LONG = 8, 10, 26
# Tokens of each sequence of the untimed pass before reading is timed.
WARM_UP_TOKENS = 8
# Steps that are timed after an untimed one, in which MLX may compile.
TIMED_STEPS = 2
# Tokens of a measurement, and of a calibration, which looks at many scales.
MEASURED_TOKENS, CALIBRATED_TOKENS = 256, 64

Result = TypeVar("Result")
OnStage = Callable[[int, int], None]
NUM_STAGES = 4


def rehearse(
    request: TrainingRequest,
    target: Target,
    student: Student,
    prompts: Sequence[list[int]],
    on_stage: OnStage,
) -> Pace:
    """Time the stages of a run. Seeds MLX's global random state, waits for the device.

    Args:
        request: The run.
        target: The teacher.
        student: The drafter, whose weights change.
        prompts: Beginnings of texts that the target continues, token ids.
        on_stage: Called with the number of stages done and of all of them.

    Raises:
        NonFiniteError: The target's hidden states or logits are not finite, or do not fit float16.
    """
    on_stage(0, NUM_STAGES)
    sequences, writing = _write(request, target, prompts)
    on_stage(1, NUM_STAGES)
    k = request.top_k
    beginnings = [
        TokenSequence(one.tokens[:WARM_UP_TOKENS], one.is_trained[:WARM_UP_TOKENS])
        for one in sequences
    ]
    few = read_sequences(target, beginnings, k)
    shard, seconds = _timed(lambda: read_sequences(target, sequences, k), is_warm=True)
    if student.layers:
        read_states(target, few, student.layers)
        states, extra = _timed(lambda: read_states(target, shard, student.layers), is_warm=True)
        shard, seconds = replace(shard, states=states), seconds + extra
    reading = seconds / shard.tokens.shape[0]
    rollout = 0.0
    if request.loss.recipe == "rollouts":
        few, length = _first_tokens(shard, ROLLOUT_POSITIONS), request.network.beam_length
        _, seconds = _timed(lambda: roll_out(target, few, length))
        rollout = seconds / few.tokens.shape[0]
    on_stage(2, NUM_STAGES)
    ids = None if student.row_ids is None else np.arange(student.head_rows, dtype=np.int32)
    initialise(student, None, 0, ids)
    step = _time_step(request, target, student, shard)
    on_stage(3, NUM_STAGES)
    evaluation = _time_evaluation(request, student, shard)
    on_stage(4, NUM_STAGES)
    return Pace(writing, reading, rollout, step, *evaluation)


def _write(
    request: TrainingRequest, target: Target, prompts: Sequence[list[int]]
) -> tuple[list[TokenSequence], float]:
    """Let the target write: sequences of one length, and the seconds per token."""
    temps, longest = (0.0, request.data_options.temp), request.data_options.sequence_length
    jobs = [
        GenerationJob(prompts[i % len(prompts)][:PROMPT_TOKENS], temps[i % 2])
        for i in range(ROUND_SIZE)
    ]
    generator = TextGenerator(target.model, (), 0)  # no text ends early

    def write(answer_tokens: int) -> list[TokenSequence]:
        limits = AnswerLimits(answer_tokens, longest)
        return generator.generate_round(jobs, limits, 0)

    _, short = _timed(lambda: write(SHORT))
    texts, long = _timed(lambda: write(LONG), is_warm=True)
    tokens = np.concatenate([text.tokens for text in texts])
    size = min(len(tokens) // BATCH_SEQUENCES, longest)
    starts = range(0, BATCH_SEQUENCES * size + 1, size)
    sequences = [TokenSequence(tokens[a:b], np.arange(size) > 0) for a, b in pairwise(starts)]
    written = sum(int(text.is_trained.sum()) for text in texts) - ROUND_SIZE * SHORT
    # Where a pass takes next to nothing, noise may leave less than nothing of the difference.
    return sequences, max(long - short, 0.1 * long) / written


def _time_step(request: TrainingRequest, target: Target, student: Student, shard: Shard) -> float:
    """Time optimiser steps on a batch of the run's size; the drafter's weights change."""
    length, stretch = request.network.beam_length, stretch_of(student, request)
    size = max(1, request.training.batch_tokens // stretch) * stretch
    count = shard.tokens.shape[0]
    group = Group(shard, np.arange(count), np.ones((count, length - 1), np.bool_))
    rows = HeadRows(
        None if student.row_ids is None else np.array(student.row_ids), target.vocab_size
    )
    optimiser = Optimiser(student, stretch, request.loss, request.training, total_steps=1000)

    def step() -> None:
        batch = gather(group, np.arange(size) % count, size, length, rows)
        mx.eval(optimiser.step(batch), optimiser.arrays())

    step()
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step()
    return (time.perf_counter() - start) / TIMED_STEPS


def _time_evaluation(
    request: TrainingRequest, student: Student, shard: Shard
) -> tuple[float, float, float]:
    """Seconds per token of a regular measurement, of all at the end, and of calibration."""
    few, fewer = (_first_tokens(shard, n) for n in (MEASURED_TOKENS, CALIBRATED_TOKENS))

    def time_simulation(plan: DraftPlan) -> float:
        """Mean time of greedy and sampled texts, of which half of the held-out ones are each."""
        temps = (0.0, request.data_options.temp)
        return sum(
            _timed(lambda temp=temp: simulate(student, [few], plan, temp))[1]  # type: ignore[misc]
            for temp in temps
        ) / (len(temps) * few.tokens.shape[0])

    chain, *others = map(time_simulation, student.plans(request.network.beam_length).values())
    _, seconds = _timed(lambda: student.calibrate([fewer]))
    return chain, sum(others), seconds / fewer.tokens.shape[0]


def _first_tokens(shard: Shard, count: int) -> Shard:
    """The first tokens of a shard, as one sequence."""
    arrays = {name: array[:count] for name, array in shard.arrays().items() if name != "starts"}
    starts = mx.array([0, arrays["tokens"].shape[0]], dtype=mx.int32)
    return replace(shard, starts=starts, **arrays)


def _timed(work: Callable[[], Result], is_warm: bool = False) -> tuple[Result, float]:
    """A result and the seconds it took, after an untimed call, in which MLX may compile."""
    if not is_warm:
        work()
    start = time.perf_counter()
    return work(), time.perf_counter() - start
