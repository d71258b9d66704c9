"""A whole training run, from files to a drafter folder with its card."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import mlx.core as mx

from mlx_redrafter.checkpoint_files import shared_name, write_text
from mlx_redrafter.checkpoints.cards import CARD_FILE, render_card
from mlx_redrafter.decoding.delivery import DecodingStats
from mlx_redrafter.proposers.checkpoint import SIMULATED, write_drafter
from mlx_redrafter.training.batches import BatchOrder
from mlx_redrafter.training.corpus import Corpus
from mlx_redrafter.training.files import locking, remove_leftovers
from mlx_redrafter.training.generated_texts import find_generated
from mlx_redrafter.training.preparation import Preparation
from mlx_redrafter.training.state import TrainingProgress
from mlx_redrafter.training.students.student import Student, simulate
from mlx_redrafter.training.teacher_cache import Shard
from mlx_redrafter.training.trainer import Trainer, choose_batches
from mlx_redrafter.training.training_request import Reporter, TrainingRequest
from mlx_redrafter.version import __version__

# Training objective of each recipe, as the card describes it.
OBJECTIVES = {
    "soft": "KL divergence from the target's distributions (most probable tokens and the rest)",
    "coupled": "probability of sampling the target's token with the same Gumbel noise",
    "overlap": "total variation from the target's distributions, and cross-entropy on the text "
    "(DSpark)",
    "apple": "cross-entropy on the text, as in Apple's released code",
}
# Paragraphs after the table of facts.
_MEASURED = """## Accepted drafts

Simulated on {num_reported} of {num_texts} texts that the target generated from held-out beginnings,
half greedily, half sampled at temperature {temp:g}. The others have chosen the step and the
calibration; a single text does both. The training text may include other parts of the files that
the beginnings come from. Drafts for sampled texts are ranked with the target's Gumbel noise, as in
decoding with a seed.

| drafts | tokens/step | acceptance rate by position |
|---|---|---|
| chain of {num_drafts} | {rate:.2f} | {by_position} |

## Training curve

Tokens/step of the texts that have chosen the step.

| step | seconds | loss (nats) | tokens/step |
|---|---|---|---|
{curve}
"""


@dataclass(frozen=True)
class TrainingResult:
    """The drafter in ``out``, but in float32, and its simulated decoding of held-out texts."""

    student: Student
    measured: DecodingStats


def train_drafter(
    request: TrainingRequest, reporter: Reporter, on_begin: Callable[[], object] = lambda: None
) -> TrainingResult | None:
    """Train a drafter and write it to ``request.out``; return it, or None for a dry run.

    ``on_begin`` is called after all checks, before the first file is written. Raise
    `RedrafterError` if the files, the target, the options, the disk or the memory do not allow the
    run, as far as possible before any long computation. A run that has ``request.out`` already is
    an error, too.
    """
    request.check_output()
    with ExitStack() as lock:
        if request.out.is_dir():  # before the rehearsal, which may take minutes
            lock.enter_context(locking(request.out))

        def begin() -> None:
            lock.close()
            lock.enter_context(locking(request.out))
            request.check_output()  # another run may have begun and ended meanwhile
            on_begin()
            remove_leftovers(request.out)

        return _train(request, reporter, begin)


def _train(
    request: TrainingRequest, reporter: Reporter, on_begin: Callable[[], object]
) -> TrainingResult | None:
    begun = time.monotonic()
    preparation = Preparation(request, reporter)
    timetable = preparation.plan()
    if request.dry_run:
        return None
    on_begin()
    corpus, request = preparation.run(), preparation.request
    student, cache = preparation.student, preparation.cache
    target = preparation.target_facts
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
    choosing, reporting = split_held_out([text for shard in shards for text in shard.texts()])

    def watched(texts: Sequence[Shard]) -> Iterator[Shard]:
        """Iterate over held-out texts, with a report before each."""
        for number, text in enumerate(texts):
            reporter.progress("evaluation", number, len(texts))
            yield text

    trainer = Trainer(student, order, lambda: watched(choosing), request, identity, total_steps)
    if trainer.progress.step:
        reporter.say(f"resuming at step {trainer.progress.step:,}")
    best = trainer.run(
        on_step=lambda progress: _report_step(progress, reporter),
        on_best=lambda student: _save(student, request, target),
    )
    best.calibrate(watched(choosing))
    measured = simulate(best, watched(reporting), request.network.length, request.data_options.temp)
    _save(best, request, target, measured)
    card = request, target["fingerprint"], corpus, best, trainer.progress
    _write_card(*card, measured, len(reporting))
    return TrainingResult(best, measured)


def split_held_out(texts: Sequence[Shard]) -> tuple[Sequence[Shard], Sequence[Shard]]:
    """Split the texts with a continuation: the first half chooses the weights, the other reports.

    A single text does both.
    """
    used = [text for text in texts if find_generated(text)]
    middle = len(used) // 2
    return (used[:middle], used[middle:]) if middle else (used, used)


def _describe_run(request: TrainingRequest, preparation: Preparation, corpus: Corpus) -> str:
    """Render the options and texts that a resumed run must share, as JSON."""
    options = {
        **asdict(request.data_options),
        **asdict(request.network),
        **asdict(request.training),
        "target": preparation.target_facts["fingerprint"],
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


def _save(
    student: Student,
    request: TrainingRequest,
    target: Mapping[str, str],
    measured: DecodingStats | None = None,
) -> None:
    """Write the drafter, with its tokens per step once they are known."""
    facts: dict[str, object] = {"target": target}
    if measured is not None:
        rate = round(measured.tokens_per_step or 1.0, 3)
        facts[SIMULATED] = {"length": request.network.length, "tokens_per_step": rate}
    network = student.with_weights({}).network
    network.set_dtype(mx.float16)
    write_drafter(network, request.out, facts)


def _write_card(
    request: TrainingRequest,
    target_fingerprint: str,
    corpus: Corpus,
    student: Student,
    progress: TrainingProgress,
    measured: DecodingStats,
    num_reported: int,
) -> None:
    """Write the card to ``README.md``, with simulated decoding of ``num_reported`` texts."""
    target, options = shared_name(request.model), request.training
    start, adapter = request.network.start_from, request.adapter_path
    adapted = "" if adapter is None else f" with the adapter `{shared_name(adapter)}`"
    files = [path.name for path in (*request.data, *request.prompts)]
    sources = corpus.given, corpus.self_generated
    given, generated = (sum(one.num_trained for one in sequences) for sequences in sources)
    rows = {
        "target": f"`{target}`{adapted}, weights {target_fingerprint}",
        "started from": "new weights" if start is None else f"`{shared_name(start)}`",
        "head": student.summary,
        "objective": OBJECTIVES[options.recipe],
        "files": ", ".join(f"`{name}`" for name in files) or "none, the target wrote all texts",
        "tokens": f"{given:,} given, {generated:,} self-generated by the target",
        "steps": f"{progress.step:,} of {progress.total_steps:,}, of "
        f"{options.batch_tokens:,} positions, in {progress.seconds / 60:.1f} minutes; the weights "
        f"are the averaged ones of step {progress.best_step:,}",
        "learning rate": f"{options.lr or student.learning_rate:g}, seed {options.seed}",
        "made with": f"mlx-redrafter {__version__}",
    }
    summary = (
        f"{student.name[0].upper() + student.name[1:]} that makes this model decode faster without "
        "changing its text, for these weights only."
    )
    rest = _MEASURED.format(
        num_drafts=request.network.length - 1,
        rate=measured.tokens_per_step or 1.0,
        by_position=" ".join(f"{rate:.0%}" for rate in measured.acceptance_rate_by_depth),
        num_reported=num_reported,
        num_texts=len(corpus.held_out),
        temp=request.data_options.temp,
        curve="\n".join(
            f"| {p.step:,} | {p.seconds:.0f} | {'' if p.step == 0 else f'{p.loss:.3f}'} | "
            f"{p.tokens_per_step:.2f} |"
            for p in progress.curve
        ),
    )
    card = render_card(f"Drafter for {target}", target, summary, rows, rest)
    write_text(request.out / CARD_FILE, card)
