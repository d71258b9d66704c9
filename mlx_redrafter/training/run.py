"""A whole training run, from files to a drafter folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.checkpoint_files import shared_name
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.training.batches import BatchOptions, BatchOrder
from mlx_redrafter.training.corpus import Corpus
from mlx_redrafter.training.curves import write_csv, write_picture
from mlx_redrafter.training.files import remove_leftovers
from mlx_redrafter.training.preparation import DistillationInputs, Preparation
from mlx_redrafter.training.reporter import Reporter
from mlx_redrafter.training.request import STATE_FOLDER, TrainingRequest
from mlx_redrafter.training.simulation import simulate
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.teacher_cache import TeacherCache
from mlx_redrafter.training.trainer import Trainer, TrainingTask, stretch_of
from mlx_redrafter.training.training_card import TrainingSummary, write_training_card
from mlx_redrafter.training.training_options import TrainingOptions


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run.

    Attributes:
        student: The drafter in ``out``, but in float32.
        measured: Statistics of simulated decoding on held-out texts, by the name of the draft
            shape.
    """

    student: Student
    measured: dict[str, DecodingStats]


def train_drafter(
    request: TrainingRequest, reporter: Reporter, on_begin: Callable[[], object] = lambda: None
) -> TrainingResult | None:
    """Train a drafter and write it to ``request.out``.

    Args:
        request: The request.
        reporter: Receiver of progress and messages.
        on_begin: Called when everything is checked, before the first text is written.

    Returns:
        The drafter, or None for a dry run.

    Raises:
        RedrafterError: The files, the target, the options, the disk or the memory do not allow the
            run; checked before any long computation, as far as possible.
    """
    begun = time.monotonic()
    preparation = Preparation.of(request, reporter)
    timetable = preparation.plan(reporter)
    if request.dry_run:
        return None
    on_begin()
    remove_leftovers(request.out)
    corpus, inputs = preparation.run(reporter)
    cache = preparation.cache
    del preparation
    mx.clear_cache()  # the target is not referenced any more
    options = request.training
    if timetable is not None:
        options = replace(options, num_evaluations=timetable.num_evaluations)
    task = _make_task(request, inputs, cache, options)
    identity = _describe_run(request, inputs, corpus)
    schedule, minutes = None, request.training.minutes
    if timetable is not None and minutes is not None:
        schedule = timetable.schedule(minutes, time.monotonic() - begun)
    trainer = Trainer(inputs.student, task, request.out / STATE_FOLDER, identity, schedule)
    if trainer.progress.step:
        reporter.say(f"going on from step {trainer.progress.step:,}")
    student = trainer.run(
        on_step=lambda p: _report_step(p, request.out, reporter),
        on_best=lambda best: _save(best, request, inputs.target_fingerprint),
    )
    student.calibrate(task.held_out)
    measured = {
        name: simulate(student, task.held_out, plan, task.temp)
        for name, plan in student.plans(request.network.beam_length).items()
    }
    _finish(request, inputs, corpus, trainer, student, measured)
    if not write_picture(request.out, trainer.progress.curve):
        reporter.say("no curves.png: matplotlib is not installed (mlx-redrafter[plot])")
    return TrainingResult(student, measured)


def _make_task(
    request: TrainingRequest,
    inputs: DistillationInputs,
    cache: TeacherCache,
    options: TrainingOptions,
) -> TrainingTask:
    student = inputs.student
    batch_options = BatchOptions(
        request.loss.recipe,
        request.network.beam_length,
        options.batch_tokens,
        options.seed,
        stretch_of(student, request),
        student.layers,
    )
    return TrainingTask(
        BatchOrder(cache, "train", batch_options, inputs.rows),
        [
            cache.load("held-out", n, layers=student.layers)
            for n in range(cache.num_shards("held-out"))
        ],
        request.data_options.temp,
        request.loss,
        options,
    )


def _describe_run(request: TrainingRequest, inputs: DistillationInputs, corpus: Corpus) -> str:
    """Render what must be the same for a run to be continued, as JSON."""
    network = asdict(request.network)
    if network["layers_read"] is None:  # as in runs from before there was such an option
        del network["layers_read"]
    training = {k: v for k, v in asdict(request.training).items() if k != "checkpoint_seconds"}
    return json.dumps(
        {
            "target": inputs.target_fingerprint,
            "start": inputs.start_fingerprint,
            "tokens": sum(map(len, corpus.train)),
            "top_k": request.top_k,
            **asdict(request.data_options),
            **network,
            **asdict(request.loss),
            **training,
        },
        sort_keys=True,
    )


def _report_step(progress: Any, out: Path, reporter: Reporter) -> None:
    if progress.curve[-1].step == progress.step:
        write_csv(out, progress.curve)
        point = progress.curve[-1]
        reporter.say(
            f"step {point.step:,}: loss {point.loss:.3f}, {point.tokens_per_step:.2f} tokens/step"
        )
    reporter.progress("training", progress.step, progress.total_steps)


def _save(student: Student, request: TrainingRequest, target_fingerprint: str) -> None:
    target = {"name": shared_name(request.model), "fingerprint": target_fingerprint}
    student.in_dtype(getattr(mx, request.dtype)).save(request.out, {"target": target})


def _finish(
    request: TrainingRequest,
    inputs: DistillationInputs,
    corpus: Corpus,
    trainer: Trainer,
    student: Student,
    measured: dict[str, DecodingStats],
) -> None:
    _save(student, request, inputs.target_fingerprint)
    write_csv(request.out, trainer.progress.curve)
    files = [path.name for path in (*request.data, *request.prompts)]
    write_training_card(
        request.out,
        TrainingSummary(
            shared_name(request.model),
            inputs.target_fingerprint,
            None if request.start_from is None else shared_name(request.start_from),
            files,
            corpus,
            student,
            request.loss,
            request.training,
            trainer.progress,
            measured,
        ),
    )
