"""A whole training run, from files to a drafter folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import mlx.core as mx

from mlx_redrafter.decoding.delivery import DecodingStats
from mlx_redrafter.training.batches import BatchOrder
from mlx_redrafter.training.corpus import Corpus
from mlx_redrafter.training.files import remove_leftovers
from mlx_redrafter.training.preparation import Preparation
from mlx_redrafter.training.simulated_decoding import simulate
from mlx_redrafter.training.state import TrainingProgress
from mlx_redrafter.training.students.student import Student
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training.trainer import Trainer, choose_batches
from mlx_redrafter.training.training_report import write_training_card
from mlx_redrafter.training.training_request import Reporter, TrainingRequest


@dataclass(frozen=True)
class TrainingResult:
    """The drafter in ``out``, but in float32, and its simulated decoding of held-out texts."""

    student: Student
    measured: DecodingStats


def train_drafter(
    request: TrainingRequest, reporter: Reporter, on_begin: Callable[[], object] = lambda: None
) -> TrainingResult | None:
    """Train a drafter and write it to ``request.out``; return it, or None for a dry run.

    ``on_begin`` is called after all checks, before the first file is written.

    Raises:
        RedrafterError: The files, the target, the options, the disk or the memory do not allow the
            run; checked before any long computation, as far as possible.
    """
    begun = time.monotonic()
    request.check_output()
    preparation = Preparation(request, reporter)
    timetable = preparation.plan()
    if request.dry_run:
        return None
    on_begin()
    remove_leftovers(request.out)
    corpus, request = preparation.run(), preparation.request
    student, cache = preparation.student, preparation.cache
    fingerprint, target = preparation.target_fingerprint, preparation.target_facts
    identity = _describe_run(request, preparation, corpus)
    del preparation
    mx.clear_cache()  # nothing refers to the target now, except students that need it
    total_steps = None
    if timetable is not None:
        options = replace(request.training, num_evaluations=timetable.num_evaluations)
        request = replace(request, training=options)
        if options.minutes is not None:
            total_steps = timetable.count_steps(options.minutes, time.monotonic() - begun)
    order = BatchOrder(cache, "train", choose_batches(student, request), student.rows)
    shards = (
        cache.load("held-out", n, student.layers) for n in range(cache.num_shards("held-out"))
    )
    held_out = [text for shard in shards for text in shard.texts()]

    def watched() -> Iterator[Shard]:
        """Iterate over the held-out texts, with a report before each."""
        for number, text in enumerate(held_out):
            reporter.progress("evaluation", number, len(held_out))
            yield text

    trainer = Trainer(student, order, watched, request, identity, total_steps)
    if trainer.progress.step:
        reporter.say(f"resuming at step {trainer.progress.step:,}")
    best = trainer.run(
        on_step=lambda progress: _report_step(progress, reporter),
        on_best=lambda student: _save(student, request, target),
    )
    best.calibrate(watched())
    measured = simulate(best, watched(), request.network.length, request.data_options.temp)
    _save(best, request, target)
    write_training_card(request, fingerprint, corpus, best, trainer.progress, measured)
    return TrainingResult(best, measured)


def _describe_run(request: TrainingRequest, preparation: Preparation, corpus: Corpus) -> str:
    """Render the options and texts that a resumed run must share, as JSON."""
    options = {
        **asdict(request.data_options),
        **asdict(request.network),
        **asdict(request.training),
        "target": preparation.target_fingerprint,
        "start_from": preparation.start_fingerprint,
        "trained tokens": sum(map(len, corpus.train)),
    }
    del options["checkpoint_seconds"]
    return json.dumps(options, sort_keys=True)


def _report_step(progress: TrainingProgress, reporter: Reporter) -> None:
    point = progress.curve[-1]
    if point.step == progress.step:
        reporter.say(
            f"step {point.step:,}: loss {point.loss:.3f}, {point.tokens_per_step:.2f} tokens/step"
        )
    reporter.progress("training", progress.step, progress.total_steps)


def _save(student: Student, request: TrainingRequest, target: Mapping[str, str]) -> None:
    student.in_dtype(mx.float16).save(request.out, {"target": target})
