"""The part of a run that needs the target: checks, estimates, texts, and its outputs on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.errors import DataError
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.batches import HeadRows
from mlx_redrafter.training.corpus import (
    Corpus,
    Sources,
    as_prompt_source,
    build_corpus,
    describe,
    divide,
)
from mlx_redrafter.training.data import Encoder, read_items
from mlx_redrafter.training.duration import Timetable, Workload
from mlx_redrafter.training.fingerprinting import fingerprint_weights
from mlx_redrafter.training.initial import (
    compute_head_matrix,
    load_earlier_drafter,
    select_frequent_tokens,
)
from mlx_redrafter.training.rehearsal import rehearse
from mlx_redrafter.training.reporter import Reporter
from mlx_redrafter.training.request import STATE_FOLDER, TrainingRequest
from mlx_redrafter.training.resources import (
    StudentSize,
    check_minutes,
    check_resources,
    count_work,
    estimate,
)
from mlx_redrafter.training.self_generated import ROUND_SIZE, TextGenerator
from mlx_redrafter.training.state import has_state
from mlx_redrafter.training.students.recurrent_student import RecurrentStudent
from mlx_redrafter.training.students.student import Student, initialise
from mlx_redrafter.training.students.student_kinds import new_student
from mlx_redrafter.training.target_size import TargetSize
from mlx_redrafter.training.teacher import fill_cache, fill_rollouts, fill_states
from mlx_redrafter.training.teacher_cache import TeacherCache


class DistillationInputs(NamedTuple):
    """Inputs of the distillation beside the teacher cache; the target itself is not needed.

    Attributes:
        student: The drafter before training.
        rows: Rows of the drafter's head.
        target_fingerprint: Fingerprint of the target's weights.
        start_fingerprint: Fingerprint of the earlier drafter's weights, None for a new drafter.
    """

    student: Student
    rows: HeadRows
    target_fingerprint: str
    start_fingerprint: str | None


@dataclass(frozen=True)
class Preparation:
    """A run that may begin: checked, estimated, with its target in memory.

    Attributes:
        request: The request, its sequences no longer than the target's context.
        target: The teacher.
        tokenizer: The target's tokenizer.
        sources: Texts divided by their use.
        encoder: Encoder of the texts.
        student: The drafter; a new one has no weights yet.
        cache: The teacher cache.
        fingerprint: Fingerprint of the target's weights.
    """

    request: TrainingRequest
    target: Target
    tokenizer: TokenizerWrapper
    sources: Sources
    encoder: Encoder
    student: Student
    cache: TeacherCache
    fingerprint: str

    @classmethod
    def of(cls, request: TrainingRequest, reporter: Reporter) -> Preparation:
        """Load and check what a request names.

        Raises:
            RedrafterError: The files, the target or the options do not allow the run.
        """
        data = read_items(request.data)
        prompts = read_items(request.prompts, lines_are_prompts=True)
        model, tokenizer, _ = load(
            request.model,
            adapter_path=request.adapter_path,
            trust_remote_code=request.trust_remote_code,
        )
        target = Target(model)
        request = _fit_to_context(request, target, reporter)
        options = request.data_options
        sources = divide(data, prompts, options)
        if request.start_from is None:
            student = new_student(target, request.network)
        else:
            drafter = load_earlier_drafter(request.start_from, target, tokenizer.vocab_size)
            student = RecurrentStudent(drafter, target.embed)
        fingerprint = fingerprint_weights(model)
        identity = {
            "target": fingerprint,
            "texts": sources.text_fingerprint,
            "chat template": str(getattr(tokenizer, "chat_template", None)),
            "top_k": request.top_k,
            "top_k held out": request.held_out_top_k,
            **describe(options),
        }
        return cls(
            request,
            target,
            tokenizer,
            sources,
            Encoder(tokenizer, options.sequence_length, target.vocab_size),
            student,
            TeacherCache(request.cache_folder, identity),
            fingerprint,
        )

    def plan(self, reporter: Reporter) -> Timetable | None:
        """Say what the run takes, and check that there is as much.

        Returns:
            The time, or None for a run whose training has begun, which knows its steps.

        Raises:
            ResourceError: There is not enough disk, memory or time.
        """
        request = self.request
        work = count_work(self.sources, self.encoder, request)
        size = StudentSize.of(self.student)
        needed = estimate(work, request, TargetSize.of(self.target), size)
        check_resources(needed, self.cache.folder)
        reporter.say(f"needs {needed}")
        if has_state(request.out / STATE_FOLDER):
            return None
        return self._plan_time(work, reporter)

    def _plan_time(self, work: Workload, reporter: Reporter) -> Timetable:
        request, sources = self.request, self.sources
        items = [*sources.prompts, *sources.held_out][:ROUND_SIZE]
        prompts = [as_prompt_source(i, self.encoder, request.data_options).tokens for i in items]
        pace = rehearse(
            request,
            self.target,
            self.student.holding(self.student.new_network()),
            prompts,
            lambda done, total: reporter.progress("rehearsal", done, total),
        )
        mx.clear_cache()
        minutes = request.training.minutes
        timetable = Timetable.of(work, pace, minutes)
        if minutes is not None:
            check_minutes(timetable, minutes)
        reporter.say(f"takes {timetable}")
        if is_slow(self.target.dtype, "scales" in self.target.embedding):
            reporter.say(
                "the model computes in 16 bits, which on a CPU takes many times as long as in 32: "
                "train with a copy of its weights that mlx_lm.convert --dtype float32 has made"
            )
        return timetable

    def run(self, reporter: Reporter) -> tuple[Corpus, DistillationInputs]:
        """Do all work that needs the target, and fill the cache."""
        self.cache.begin()
        options = self.request.data_options
        generator = TextGenerator(self.target.model, self.tokenizer.eos_token_ids, options.seed)
        corpus = build_corpus(
            self.sources, self.encoder, generator, options, self.cache.folder, reporter.progress
        )
        _check_corpus(corpus)
        _fill(self.cache, corpus, self.target, self.student, self.request, reporter)
        return corpus, self._collect_inputs(corpus)

    def _collect_inputs(self, corpus: Corpus) -> DistillationInputs:
        target, student, start = self.target, self.student, None
        if self.request.start_from is None:
            self._initialise(corpus)
        else:
            start = fingerprint_weights(student.network)
        student.leave_target()
        ids = None if student.row_ids is None else np.array(student.row_ids)
        rows = HeadRows(ids, target.vocab_size)
        return DistillationInputs(student, rows, self.fingerprint, start)

    def _initialise(self, corpus: Corpus) -> None:
        target, student, token_ids = self.target, self.student, None
        if student.row_ids is not None:
            token_ids = select_frequent_tokens(
                corpus.train, self.tokenizer.eos_token_ids, student.head_rows, target.vocab_size
            )
        initialise(student, compute_head_matrix(target), self.request.training.seed, token_ids)


def _fit_to_context(
    request: TrainingRequest, target: Target, reporter: Reporter
) -> TrainingRequest:
    options, limit = request.data_options, target.context_length
    if limit is None or options.sequence_length <= limit:
        return request
    reporter.say(f"sequences are cut to the model's context of {limit} tokens")
    return replace(request, data_options=replace(options, sequence_length=limit))


def _check_corpus(corpus: Corpus) -> None:
    if not any(int(s.is_trained.sum()) > 1 for s in corpus.held_out):
        raise DataError(
            "expected the target to continue held-out prompts, found only empty continuations; "
            "give other prompts"
        )


def _fill(
    cache: TeacherCache,
    corpus: Corpus,
    target: Target,
    student: Student,
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
        if student.layers:
            fill_states(
                cache,
                split,  # type: ignore[arg-type]
                target,
                student.layers,
                lambda done, total=total: reporter.progress("reading layers", done, total),  # type: ignore[misc]
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


def is_slow(dtype: mx.Dtype, is_quantised: bool) -> bool:
    """Whether a model of this dtype takes many times as long here as the same one in float32."""
    is_half = dtype in (mx.float16, mx.bfloat16) and not is_quantised
    return is_half and mx.default_device().type == mx.DeviceType.cpu
