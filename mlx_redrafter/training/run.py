"""A whole training run, from files to a drafter folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checkpoint import shared_name
from mlx_redrafter.config import DraftPlan
from mlx_redrafter.decoding.stats import DecodingStats
from mlx_redrafter.errors import DataError
from mlx_redrafter.loading import load
from mlx_redrafter.proposers.redrafter.calibration import calibrate
from mlx_redrafter.proposers.redrafter.checkpoint import copy_drafter, save_drafter
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter, Embed
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.batches import BatchOptions, BatchOrder, HeadRows
from mlx_redrafter.training.corpus import Corpus, build_corpus, describe, divide
from mlx_redrafter.training.curves import write_csv, write_picture
from mlx_redrafter.training.data import Encoder, read_items
from mlx_redrafter.training.files import remove_leftovers
from mlx_redrafter.training.fingerprinting import fingerprint_weights
from mlx_redrafter.training.initial import (
    choose_drafter_config,
    compute_head_matrix,
    initialise_drafter,
    load_earlier_drafter,
    select_frequent_tokens,
)
from mlx_redrafter.training.options import (
    DataOptions,
)
from mlx_redrafter.training.request import CACHE_FOLDER, STATE_FOLDER, TrainingRequest
from mlx_redrafter.training.resources import check_resources, estimate, estimate_tokens
from mlx_redrafter.training.self_generated import TextGenerator
from mlx_redrafter.training.simulation import iterate_generated_texts, simulate
from mlx_redrafter.training.teacher import fill_cache, fill_rollouts
from mlx_redrafter.training.teacher_cache import TeacherCache
from mlx_redrafter.training.trainer import Trainer, TrainingTask
from mlx_redrafter.training.training_card import TrainingSummary, write_training_card


class Reporter(Protocol):
    """Receiver of progress and messages; a KeyboardInterrupt from `progress` stops the run."""

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """Report that ``done`` of ``total`` tokens or steps of a stage are done."""
        ...

    def say(self, message: str) -> None:
        """Report a message of one line."""
        ...


class DistillationInputs(NamedTuple):
    """Inputs of the distillation beside the teacher cache; the target itself is not needed.

    Attributes:
        embedding: The target's input embedding, shape (V, H).
        drafter: The drafter before training.
        rows: Rows of the drafter's head.
        target_fingerprint: Fingerprint of the target's weights.
        start_fingerprint: Fingerprint of the earlier drafter's weights, None for a new drafter.
    """

    embedding: mx.array
    drafter: Drafter
    rows: HeadRows
    target_fingerprint: str
    start_fingerprint: str | None


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run.

    Attributes:
        drafter: The drafter in ``out``, but in float32.
        measured: Statistics of simulated decoding on held-out texts, by the name of the draft
            shape.
    """

    drafter: Drafter
    measured: dict[str, DecodingStats]


def train_drafter(request: TrainingRequest, reporter: Reporter) -> TrainingResult:
    """Train a drafter and write it to ``request.out``.

    Raises:
        RedrafterError: The files, the target, the options, the disk or the memory do not allow the
            run; checked before any long computation, as far as possible.
    """
    cache_folder = request.cache or request.out / CACHE_FOLDER
    remove_leftovers(request.out)
    corpus, cache, inputs = _run_teacher(request, cache_folder, reporter)
    mx.clear_cache()  # the target is not referenced any more
    batch_options = BatchOptions(
        request.loss.recipe,
        request.network.beam_length,
        request.training.batch_tokens,
        request.training.seed,
    )
    held_out = [cache.load("held-out", n) for n in range(cache.num_shards("held-out"))]
    task = TrainingTask(
        lambda tokens: inputs.embedding[tokens],
        BatchOrder(cache, "train", batch_options, inputs.rows),
        held_out,
        request.data_options.temp,
        request.loss,
        request.training,
    )
    identity = _describe_run(request, inputs, corpus)
    trainer = Trainer(inputs.drafter, task, request.out / STATE_FOLDER, identity)
    if trainer.progress.step:
        reporter.say(f"going on from step {trainer.progress.step:,}")
    drafter = trainer.run(
        on_step=lambda p: _report_step(p, request.out, reporter),
        on_best=lambda best: _save(best, request, inputs.target_fingerprint),
    )
    texts = (text for shard in task.held_out for text in iterate_generated_texts(shard))
    drafter.config = calibrate(drafter, task.embed, texts).applied(drafter.config)
    measured = measure(drafter, task.embed, task, request.network.beam_length)
    _finish(request, inputs, corpus, trainer, drafter, measured)
    if not write_picture(request.out, trainer.progress.curve):
        reporter.say("no curves.png: matplotlib is not installed (mlx-redrafter[plot])")
    return TrainingResult(drafter, measured)


def measure(
    drafter: Drafter, embed: Embed, task: TrainingTask, beam_length: int
) -> dict[str, DecodingStats]:
    """Simulate decoding of the held-out texts with a chain and with a tree."""
    width = min(4, drafter.config.head_rows)
    shapes = {
        f"chain of {beam_length - 1}": DraftPlan.of(1, beam_length),
        "tree of 8": DraftPlan.of(width, beam_length),
    }
    return {
        name: simulate(drafter, embed, task.held_out, shape, task.temp)
        for name, shape in shapes.items()
    }


def _run_teacher(
    request: TrainingRequest, folder: Path, reporter: Reporter
) -> tuple[Corpus, TeacherCache, DistillationInputs]:
    """Do all work that needs the target, whose memory is free afterwards."""
    options = request.data_options
    data = read_items(request.data)
    prompts = read_items(request.prompts, lines_are_prompts=True)
    model, tokenizer, _ = load(
        request.model,
        adapter_path=request.adapter_path,
        trust_remote_code=request.trust_remote_code,
    )
    target = Target(model)
    options = _fit_to_context(options, target, reporter)
    sources = divide(data, prompts, options)
    earlier = None
    if request.start_from is not None:
        earlier = load_earlier_drafter(request.start_from, target, tokenizer.vocab_size)
    config = choose_drafter_config(target, request.network) if earlier is None else earlier.config
    needed = estimate(
        estimate_tokens(sources, options),
        len(sources.held_out) * options.sequence_length,
        request.top_k,
        request.held_out_top_k,
        request.loss,
        request.network.beam_length,
        target,
        config,
    )
    check_resources(needed, folder)
    name = fingerprint_weights(model)
    cache = TeacherCache(
        folder,
        {
            "target": name,
            "texts": sources.text_fingerprint,
            "chat template": str(getattr(tokenizer, "chat_template", None)),
            "top_k": request.top_k,
            "top_k held out": request.held_out_top_k,
            **describe(options),
        },
    )
    reporter.say(f"needs {needed}")
    encoder = Encoder(tokenizer, options.sequence_length, target.vocab_size)
    generator = TextGenerator(model, tokenizer, options.seed)
    corpus = build_corpus(sources, encoder, generator, options, folder, reporter.progress)
    _check_corpus(corpus)
    _fill(cache, corpus, target, request, reporter)
    drafter, start = earlier, None if earlier is None else fingerprint_weights(earlier)
    if drafter is None:
        drafter = _new_drafter(config, target, tokenizer, corpus, request.training.seed)
    return corpus, cache, _collect_inputs(target, drafter, name, start)


def _fill(
    cache: TeacherCache,
    corpus: Corpus,
    target: Target,
    request: TrainingRequest,
    reporter: Reporter,
) -> None:
    """Fill the cache with the target's outputs on all texts, except those of earlier runs."""
    for split, sequences, k in (
        ("train", corpus.train, request.top_k),
        ("held-out", corpus.held_out, request.held_out_top_k),
    ):
        total = sum(map(len, sequences))
        stage = f"reading {split} text"
        fill_cache(
            cache,
            split,  # type: ignore[arg-type]
            target,
            sequences,
            k,
            lambda done, stage=stage, total=total: reporter.progress(stage, done, total),  # type: ignore[misc]
        )
    if request.loss.recipe == "rollouts":
        total = sum(map(len, corpus.train))
        fill_rollouts(
            cache,
            "train",
            target,
            request.network.beam_length,
            lambda done: reporter.progress("rollouts", done, total),
        )


def _collect_inputs(
    target: Target, drafter: Drafter, name: str, start: str | None
) -> DistillationInputs:
    embedding = target.embed(mx.arange(target.vocab_size))
    mx.eval(embedding)
    rows = HeadRows(
        np.array(drafter.token_ids) if drafter.has_draft_vocab else None, target.vocab_size
    )
    return DistillationInputs(embedding, drafter, rows, name, start)


def _new_drafter(
    config: DrafterConfig, target: Target, tokenizer: TokenizerWrapper, corpus: Corpus, seed: int
) -> Drafter:
    token_ids = None
    if (count := config.draft_vocab_size) is not None:
        stop_tokens = tokenizer.eos_token_ids
        token_ids = select_frequent_tokens(corpus.train, stop_tokens, count, target.vocab_size)
    return initialise_drafter(config, compute_head_matrix(target), seed, token_ids)


def _fit_to_context(options: DataOptions, target: Target, reporter: Reporter) -> DataOptions:
    limit = target.context_length
    if limit is None or options.sequence_length <= limit:
        return options
    reporter.say(f"sequences are cut to the model's context of {limit} tokens")
    return DataOptions(**{**asdict(options), "sequence_length": limit})


def _check_corpus(corpus: Corpus) -> None:
    if not any(int(s.is_trained.sum()) > 1 for s in corpus.held_out):
        raise DataError(
            "expected the target to continue held-out prompts, found only empty continuations; "
            "give other prompts"
        )


def _describe_run(request: TrainingRequest, inputs: DistillationInputs, corpus: Corpus) -> str:
    """Render what must be the same for a run to be continued, as JSON."""
    training = {k: v for k, v in asdict(request.training).items() if k != "checkpoint_seconds"}
    return json.dumps(
        {
            "target": inputs.target_fingerprint,
            "start": inputs.start_fingerprint,
            "tokens": sum(map(len, corpus.train)),
            "top_k": request.top_k,
            **asdict(request.data_options),
            **asdict(request.network),
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


def _save(drafter: Drafter, request: TrainingRequest, target_fingerprint: str) -> None:
    copy = copy_drafter(drafter)
    copy.set_dtype(getattr(mx, request.dtype))
    save_drafter(
        copy,
        request.out,
        {"target": {"name": shared_name(request.model), "fingerprint": target_fingerprint}},
    )


def _finish(
    request: TrainingRequest,
    inputs: DistillationInputs,
    corpus: Corpus,
    trainer: Trainer,
    drafter: Drafter,
    measured: dict[str, DecodingStats],
) -> None:
    _save(drafter, request, inputs.target_fingerprint)
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
            drafter.config,
            request.loss,
            request.training,
            trainer.progress,
            measured,
        ),
    )
