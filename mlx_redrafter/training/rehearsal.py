"""A rehearsal of a run: every stage on a few tokens, timed.

Axes: n tokens of the rehearsal, L beam length.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from timeit import timeit

import mlx.core as mx
import numpy as np

from mlx_redrafter.target.target import Target
from mlx_redrafter.training.batches import gather
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.duration import Pace
from mlx_redrafter.training.self_generated import GenerationJob, TextGenerator
from mlx_redrafter.training.students.student import Student, simulate
from mlx_redrafter.training.teacher import (
    BATCH_SEQUENCES,
    MAX_CHUNK_TOKENS,
    TOP_K,
    TeacherOutputs,
    read_sequences,
)
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training.trainer import Optimiser, choose_batches
from mlx_redrafter.training.training_request import TrainingRequest

ANSWER_TOKENS = 16
MIN_TEXTS = 16
TIMED_STEPS = 2
MEASURED_TOKENS = 256
# Number of steps of generating that are not timed, in which MLX may compile.
UNTIMED = 4
# Number of tokens of each sequence of the untimed pass before reading is timed.
WARM_UP_TOKENS = 8
# Number of tokens of a calibration, which costs more, because it compares many scales.
CALIBRATED_TOKENS = 64

# Called with the number of stages done, and the number of all stages.
OnStage = Callable[[int, int], None]
NUM_STAGES = 4


def rehearse(
    request: TrainingRequest,
    target: Target,
    student: Student,
    prompts: Sequence[list[int]],
    num_generated: int,
    on_stage: OnStage,
) -> Pace:
    """Time the stages of a run; changes the student and MLX's global random state.

    As many texts are generated at once as in a run that generates so many tokens.
    """
    on_stage(0, NUM_STAGES)
    num_texts = -(-num_generated // request.data_options.answer_tokens)
    on_step = partial(on_stage, 0, NUM_STAGES)
    texts = request, target, student.layers, prompts, num_texts
    sequences, generating = _generate(*texts, on_step)
    on_stage(1, NUM_STAGES)
    warm_up = slice(WARM_UP_TOKENS)
    beginnings = [TokenSequence(one.tokens[warm_up], one.is_trained[warm_up]) for one in sequences]
    read_sequences(target, beginnings, TOP_K, student.layers)
    start = time.perf_counter()
    shard = read_sequences(target, sequences, TOP_K, student.layers)
    reading = (time.perf_counter() - start) / shard.tokens.shape[0]
    on_stage(2, NUM_STAGES)
    student.initialise(None, 0)
    step = _time_step(request, student, shard, partial(on_stage, 2, NUM_STAGES))
    on_stage(3, NUM_STAGES)
    evaluation = _time_evaluation(request, student, shard)
    on_stage(4, NUM_STAGES)
    return Pace(generating, reading, step, *evaluation)


def _generate(
    request: TrainingRequest,
    target: Target,
    layers: Sequence[int],
    prompts: Sequence[list[int]],
    num_texts: int,
    on_step: Callable[[], None],
) -> tuple[list[TokenSequence], float]:
    """Let the target continue texts; return sequences of one length, and the seconds per token."""
    options = request.data_options
    temps, longest = (0.0, options.temp), options.sequence_length
    # Half of a text: the target attends to as many tokens as in the run on average.
    half = int(mean(map(len, prompts)) + options.answer_tokens) // 2
    length = max(1, min(half, longest - ANSWER_TOKENS))
    begin = np.resize(np.concatenate(prompts), length).tolist()
    generator = TextGenerator(target, (), 0)  # no text ends early
    num_jobs = min(generator.round_size, max(MIN_TEXTS, num_texts))
    jobs = [GenerationJob(begin, temps[i % 2]) for i in range(num_jobs)]
    times: list[tuple[float, int]] = []

    def on_tokens(count: int) -> None:
        if count:  # the prompts have been read
            times.append((time.perf_counter(), count))
        on_step()

    kept = TeacherOutputs(target, [length + ANSWER_TOKENS] * num_jobs, TOP_K, layers)
    options = replace(options, answer_tokens=ANSWER_TOKENS)
    texts = generator.generate_round(jobs, options, 0, on_tokens, kept)
    tokens = np.concatenate([text.tokens for text in texts])
    size = min(min(len(tokens), MAX_CHUNK_TOKENS) // BATCH_SEQUENCES, longest)
    rows = tokens[: BATCH_SEQUENCES * size].reshape(BATCH_SEQUENCES, size)
    sequences = [TokenSequence(row, np.arange(size) > 0) for row in rows]
    (begun, _), *timed = times[UNTIMED - 1 :]
    return sequences, (timed[-1][0] - begun) / sum(count for _, count in timed)


def _time_step(
    request: TrainingRequest, student: Student, shard: Shard, on_step: Callable[[], None]
) -> float:
    """Time optimiser steps on a batch of the run's size; the drafter's weights change."""
    options = choose_batches(student, request)
    length, stretch = options.beam_length, options.stretch
    size, count = options.batch_size, shard.tokens.shape[0]
    steps = np.ones((count, length - 1), np.bool_)
    anchors = np.tile(np.arange(options.anchors), (size // stretch, 1))
    optimiser = Optimiser(student, stretch, request.training, total_steps=1000)

    def step() -> None:
        positions = np.arange(size) % count
        batch = gather(shard, steps, positions, size, length, student.rows, anchors)
        mx.eval(optimiser.step(batch), optimiser.arrays())
        on_step()

    return _time(step, TIMED_STEPS)


def _time_evaluation(
    request: TrainingRequest, student: Student, shard: Shard
) -> tuple[float, float]:
    """Time a measurement and a calibration, in seconds per token."""
    few, fewer = shard.text(0, MEASURED_TOKENS), shard.text(0, CALIBRATED_TOKENS)
    length = request.network.length
    # Half of the held-out texts are greedy, half are sampled.
    temps = 0.0, request.data_options.temp
    chains = [_time(partial(simulate, student, [few], length, temp)) for temp in temps]
    calibration = _time(partial(student.calibrate, [fewer]))
    return mean(chains) / few.tokens.shape[0], calibration / fewer.tokens.shape[0]


def _time(work: Callable[[], object], count: int = 1) -> float:
    """Return the mean seconds of calls, after an untimed one in which MLX may compile."""
    work()
    return timeit(work, number=count) / count
