"""The part of a run that needs the target: checks, estimates, texts, and its outputs on them."""

from copy import copy
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_redrafter.checkpoint_files import shared_name
from mlx_redrafter.checkpoints.identity import digest_tokens
from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.errors import DataError
from mlx_redrafter.proposers.fit import TOP_TOKENS
from mlx_redrafter.target.model_loading import find_model
from mlx_redrafter.target.target import SLOW, Target, is_slow
from mlx_redrafter.training.corpus import (
    Corpus,
    Sources,
    as_prompt_source,
    build_corpus,
    divide,
    limit_held_out,
)
from mlx_redrafter.training.data import Encoder, read_items
from mlx_redrafter.training.duration import Timetable, Workload
from mlx_redrafter.training.files import fingerprint_weights
from mlx_redrafter.training.initial import (
    choose_slice,
    compute_head_matrix,
    find_special_tokens,
    select_frequent_tokens,
)
from mlx_redrafter.training.rehearsal import rehearse
from mlx_redrafter.training.resources import (
    TargetSize,
    check_minutes,
    check_resources,
    count_weights,
    count_work,
    estimate,
)
from mlx_redrafter.training.self_generated import ROUND_SIZE, TextGenerator
from mlx_redrafter.training.self_written import (
    MEAN_TOKENS,
    SELF_WRITTEN_TOKENS,
    PromptWriter,
    count_prompts,
)
from mlx_redrafter.training.state import has_state
from mlx_redrafter.training.students.student_kinds import load_student, new_student
from mlx_redrafter.training.teacher import TOP_K, Teacher
from mlx_redrafter.training.teacher_cache import Split, TeacherCache
from mlx_redrafter.training.training_request import Reporter, TrainingRequest


class Preparation:
    """A run that may begin: checked, with its target in memory.

    Attributes:
        request: The request, fitted to the target's context and the length of an earlier drafter.
        student: The drafter; a new one has no weights until `run`.
        target_facts: Name, fingerprint and, if they can be read, digest of tokens of the target.
        start_fingerprint: Fingerprint of the earlier drafter's weights, None for a new drafter.
    """

    def __init__(self, request: TrainingRequest, reporter: Reporter):
        self._reporter = reporter
        data = read_items(request.data)
        prompts = read_items(request.prompts, lines_are_prompts=True)
        model, self._tokenizer, _ = load(
            request.model,
            adapter_path=request.adapter_path,
            trust_remote_code=request.trust_remote_code,
        )
        self._target = target = Target(model)
        options, network, limit = request.data_options, request.network, target.context_length
        if limit is not None and options.sequence_length > limit:
            reporter.say(f"sequences are cut to the model's context of {limit} tokens")
            options = replace(options, sequence_length=limit)
        self._writer: PromptWriter | None = None
        if data or prompts:
            self._sources = divide(data, prompts, options)
        else:
            options = replace(options, tokens=options.tokens or SELF_WRITTEN_TOKENS)
            self._writer = PromptWriter(target, self._tokenizer)
            self._sources = Sources([], [], [])
        self._encoder = Encoder(self._tokenizer, options.sequence_length, target.vocab_size)
        self.start_fingerprint: str | None = None
        self._special = find_special_tokens(self._tokenizer, target.vocab_size)
        if network.start_from is None:
            network = choose_slice(network, target.vocab_size, len(self._special))
            self.student = new_student(target, network)
        else:
            self.student = load_student(network.start_from, network.head, target, self._tokenizer)
            if (length := self.student.network.max_length) is not None:
                network = replace(network, length=length)
            self.start_fingerprint = fingerprint_weights(self.student.network)
        self.request = replace(request, data_options=options, network=network)
        fingerprint = fingerprint_weights(model)
        self.target_facts = {"name": shared_name(request.model), "fingerprint": fingerprint}
        if (tokens := digest_tokens(find_model(request.model))) is not None:
            self.target_facts["tokens"] = tokens
        identity = {
            "target": fingerprint,
            "texts": self._sources.text_fingerprint,
            "chat template": str(getattr(self._tokenizer, "chat_template", None)),
            "top_k": TOP_K,
            "top_k held out": TOP_TOKENS,
            **vars(options),
        }
        self.cache = TeacherCache(request.cache_folder, identity)

    def plan(self) -> Timetable | None:
        """Report the disk, memory and time that the run needs, and check that they suffice.

        Return the time, or None if training has begun, which knows its steps.
        """
        request = self.request
        if self._writer is None:
            work = count_work(self._sources, self._encoder, request)
        else:
            options, tokens = request.data_options, request.data_options.tokens or 0
            work = Workload.of(request, 0, tokens, MEAN_TOKENS, limit_held_out(options))
            work = replace(work, written=MEAN_TOKENS * count_prompts(options))
        student = self.student
        sizes = TargetSize.of(self._target), count_weights(student.network), len(student.layers)
        needed = estimate(work, *sizes, student.reads_context)
        check_resources(needed, self.cache.folder, request.out)
        self._reporter.say(f"needs {needed}")
        return None if has_state(request.state_folder) else self._plan_time(work)

    def _plan_time(self, work: Workload) -> Timetable:
        request, sources, target = self.request, self._sources, self._target
        items = [*sources.prompts, *sources.held_out][:ROUND_SIZE]
        prompts = [as_prompt_source(i, self._encoder, request.data_options).tokens for i in items]
        if self._writer is not None:
            prompts = [list(self._writer.prefix) or [0]]
        on_stage = partial(self._reporter.progress, "rehearsal")
        pace = rehearse(request, target, copy(self.student), prompts, work.generated, on_stage)
        mx.clear_cache()
        minutes = request.training.minutes
        stored, unread = self.cache.count_tokens(self.student.layers)
        left = work.left(stored, unread, is_full=self.cache.has("held-out", 0))
        timetable = Timetable.of(work, pace, minutes, left)
        if minutes is not None:
            check_minutes(timetable, minutes)
        self._reporter.say(f"needs {timetable}")
        if is_slow(target):
            self._reporter.say(SLOW)
        return timetable

    def run(self) -> Corpus:
        """Do all work that needs the target: build the corpus, fill the cache, initialise."""
        self.cache.begin()
        options, reporter = self.request.data_options, self._reporter
        if self._writer is not None:
            self._sources = self._writer.write(options, self.cache.folder, reporter)
        generator = TextGenerator(self._target, self._tokenizer.eos_token_ids, options.seed)
        teachers = self._teacher("train", TOP_K), self._teacher("held-out", TOP_TOKENS)
        texts = self._sources, self._encoder, generator, options
        corpus = build_corpus(*texts, *teachers, reporter)
        if not any(one.num_trained > 1 for one in corpus.held_out):
            raise DataError(
                "expected the target to continue held-out prompts, found only empty continuations; "
                "give other prompts"
            )
        student, token_ids = self.student, None
        if self.start_fingerprint is None:
            if student.network.row_ids is not None:
                sizes = student.head_rows, self._target.vocab_size
                token_ids = select_frequent_tokens(corpus.train, self._special, *sizes)
            head = compute_head_matrix(self._target)
            student.initialise(head, self.request.training.seed, token_ids)
        student.leave_target()
        return corpus

    def _teacher(self, split: Split, k: int) -> Teacher:
        return Teacher(self._target, self.cache, split, k, self.student.layers)
