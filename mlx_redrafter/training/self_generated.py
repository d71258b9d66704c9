"""Self-generated training data: texts by the target, which the drafter learns to predict.

Half of them are greedy, half are sampled. The target generates them in rounds, the texts of a round
at once, by plain decoding of a batch with mlx-lm's caches. The same passes give what a drafter
learns from, so nothing reads the texts again. A round is a shard of the teacher cache, so that an
interrupted run continues with the next one.

mlx-lm's own generator sorts the vocabulary or normalises it for every token, and copies the cache
whenever a text ends.

Axes: B texts, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.engine.text_comparison import num_same
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.teacher import OnTokens, Teacher, TeacherOutputs, chunk_tokens
from mlx_redrafter.training_options import DataOptions

# Maximum number of texts of a round.
ROUND_SIZE = 128
# Maximum size of the caches of a round, in bytes.
ROUND_BYTES = 2**32
# Number of tokens for which a cache makes room at once, about those of an answer.
CACHE_STEP = 256
# Minimum length of the beginning of a text that serves as a prompt, in tokens.
SHORTEST_BEGINNING = 4
# Number of different lengths of the beginnings of a text.
NUM_BEGINNINGS = 28
# Number of rounds whose prompts are sorted by length: texts of a batch attend to the longest one's.
SORTED_ROUNDS = 8
# Share of the texts in the caches that have ended before these are copied without them.
ENDED_SHARE = 0.125


class GenerationJob(NamedTuple):
    """A prompt to answer at a temperature, greedily at 0."""

    prompt: list[int]
    temp: float


class TextGenerator:
    def __init__(self, target: Target, stop_tokens: Iterable[int], seed: int):
        self.target = target
        self.stop_tokens = sorted(stop_tokens)
        self.seed = seed
        self.round_size = count_texts(measure_cache(target.model))

    def answer(
        self,
        teacher: Teacher,
        jobs: Iterator[GenerationJob],
        options: DataOptions,
        total_tokens: int | None,
        on_tokens: OnTokens,
        first: int = 0,
    ) -> list[TokenSequence]:
        """Answer prompts until there are enough tokens or no more jobs; return both, joined.

        The answers have ``total_tokens`` tokens or those of a text more, if it is not None. Each
        round becomes a shard of the teacher's, numbered from ``first``. Shards that exist are read
        instead, so a resumed run must give the same jobs in the same order.

        Seeds MLX's global random state. ``on_tokens`` receives numbers of generated tokens, without
        the prompts.
        """
        found: list[TokenSequence] = []
        num_generated, number = 0, 0
        sorted_jobs: list[GenerationJob] = []
        while total_tokens is None or num_generated < total_tokens:
            most = SORTED_ROUNDS * self.round_size
            if total_tokens is not None:  # the next ones, not the shortest of many
                mean = num_generated / len(found) if found else options.answer_tokens
                most = min(most, math.ceil((total_tokens - num_generated) / max(1, mean)))
            sorted_jobs = sorted_jobs or sorted(islice(jobs, most), key=lambda job: len(job.prompt))
            size = min(self.round_size, most)
            round_jobs, sorted_jobs = sorted_jobs[:size], sorted_jobs[size:]
            if not round_jobs:
                break
            if teacher.cache.has(teacher.split, shard := first + number):
                texts = teacher.read_shard(shard, (), lambda _: on_tokens(0))
                on_tokens(sum(text.num_trained for text in texts))
            else:
                room = [len(job.prompt) + _most_tokens(job, options) for job in round_jobs]
                kept = TeacherOutputs(self.target, room, teacher.k, teacher.layers)
                texts = self.generate_round(round_jobs, options, number, on_tokens, kept)
                made = kept.make_shard(texts)
                teacher.cache.save(teacher.split, shard, made, teacher.layers)
            found += texts
            num_generated += sum(text.num_trained for text in texts)
            number += 1
        return found

    def generate_round(
        self,
        jobs: Sequence[GenerationJob],
        options: DataOptions,
        number: int,
        on_tokens: OnTokens = lambda count: None,
        kept: TeacherOutputs | None = None,
    ) -> list[TokenSequence]:
        """Answer some prompts; ``kept`` receives the outputs, and ``number`` seeds the samples."""
        mx.random.seed(self.seed + 1_000_003 * number)
        answers: list[list[int]] = []
        # mlx-lm cannot decode some models in batches.
        size = len(jobs) if can_batch(self.target.model) else 1
        for first in range(0, len(jobs), size):
            part = jobs[first : first + size]
            answers += answer(
                self.target,
                part,
                [_most_tokens(job, options) for job in part],
                self.stop_tokens,
                on_tokens,
                None if kept is None else kept.after(first),
            )
        sequences = []
        for job, reply in zip(jobs, answers, strict=True):
            tokens = np.array([*job.prompt, *reply], dtype=np.int32)
            sequences.append(TokenSequence(tokens, np.arange(len(tokens)) >= len(job.prompt)))
        return sequences


def _most_tokens(job: GenerationJob, options: DataOptions) -> int:
    return min(options.answer_tokens, options.sequence_length - len(job.prompt))


def measure_cache(model: nn.Module) -> int:
    """Measure the cache of a text with room for `CACHE_STEP` tokens, in bytes."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 1), dtype=mx.int32), cache=caches))
    return sum(cache.nbytes for cache in caches)


def count_texts(cache_bytes: int) -> int:
    """Count the texts of a round, whose caches of so many bytes fit into `ROUND_BYTES`."""
    return max(1, min(ROUND_SIZE, ROUND_BYTES // (1 + cache_bytes)))


class PromptSource(NamedTuple):
    """A source of prompts: all of its tokens if it is fixed, else a beginning of random length."""

    tokens: list[int]
    is_fixed: bool

    def draw_prompt(self, rng: np.random.Generator) -> list[int]:
        if self.is_fixed:
            return self.tokens
        longest = SHORTEST_BEGINNING + NUM_BEGINNINGS
        return self.tokens[: int(rng.integers(SHORTEST_BEGINNING, longest))]


def plan_jobs(
    sources: Sequence[PromptSource], temp: float, num_passes: int, seed: int
) -> Iterator[GenerationJob]:
    """Plan jobs that use the sources alternately, half of them greedy, half sampled.

    A third greedy answer to a fixed prompt would repeat an earlier one, so these are only sampled
    after two passes.
    """
    rng = np.random.default_rng(seed)
    for turn in range(num_passes):
        for number, source in enumerate(sources):
            is_greedy = (number + turn) % 2 == 0 and (turn < 2 or not source.is_fixed)
            yield GenerationJob(source.draw_prompt(rng), 0.0 if is_greedy else temp)


def answer(
    target: Target,
    jobs: Sequence[GenerationJob],
    most: Sequence[int],
    stop_tokens: Sequence[int],
    on_tokens: OnTokens,
    kept: TeacherOutputs | None = None,
) -> list[list[int]]:
    """Generate an answer to each prompt.

    An answer has at most ``most`` tokens, at least 1, its stop token included. ``kept`` receives
    the outputs at all tokens but the last ones, which no pass reads. Uses MLX's global random
    state.
    """
    answers: list[list[int]] = [[] for _ in jobs]
    prompts = [job.prompt for job in jobs]
    caches = _read_prompts(target, [prompt[:-1] for prompt in prompts], lambda: on_tokens(0), kept)
    tokens = mx.array([prompt[-1] for prompt in prompts])
    rows = list(range(len(jobs)))
    is_open = set(rows)
    while is_open:
        outputs = target.compute(tokens[:, None], caches, kept.layers if kept else ())
        tokens, count = sample(outputs.logits[:, -1], [jobs[i].temp for i in rows]), len(is_open)
        if kept is not None:
            begins = np.array([len(prompts[i]) + len(answers[i]) - 1 for i in rows])
            kept.write(rows, begins, np.array([int(i in is_open) for i in rows]), outputs)
        for i, token in zip(rows, to_ints(tokens), strict=True):
            if i in is_open:
                answers[i].append(token)
                if token in stop_tokens or len(answers[i]) == most[i]:
                    is_open.remove(i)
        if is_open and len(rows) - len(is_open) > ENDED_SHARE * len(rows):
            left = [row for row, i in enumerate(rows) if i in is_open]
            where, rows = mx.array(left), [rows[row] for row in left]
            tokens = tokens[where]
            for cache in caches:
                cache.filter(where)
        on_tokens(count)
    return answers


def can_batch(model: nn.Module) -> bool:
    """Return whether mlx-lm can decode several texts of a model at once."""
    return all(hasattr(layer, "merge") for layer in make_prompt_cache(model))


def sample(logits: mx.array, temps: Sequence[float]) -> mx.array:
    """Choose a token by each row of logits (B, V), at its own temperature; 0 is greedy."""
    chosen = mx.argmax(logits, axis=-1)
    sampled = [row for row, temp in enumerate(temps) if temp > 0]
    if sampled:
        where = mx.array(sampled)
        scale = mx.array([1 / temps[row] for row in sampled])[:, None]
        drawn = mx.random.categorical(logits[where].astype(mx.float32) * scale)
        chosen[where] = drawn.astype(chosen.dtype)
    return chosen


def _read_prompts(
    target: Target,
    prompts: Sequence[list[int]],
    on_pass: Callable[[], None],
    kept: TeacherOutputs | None,
) -> list[Any]:
    """Read the common beginning of the prompts, then the rest of each, and join their caches.

    mlx-lm loses the states of some models (mamba2) if padded prompts take several passes.
    """
    size = chunk_tokens(target.vocab_size, 1)

    def read(caches: list[Any], texts: Sequence[int], prompt: Sequence[int], first: int) -> None:
        for begin in range(first, len(prompt), size):
            chunk = mx.array([prompt[begin : begin + size]])
            outputs = target.compute(chunk, caches, kept.layers if kept else ())
            if kept is not None:
                begins, counts = (np.full(len(texts), n) for n in (begin, chunk.size))
                kept.write(texts, begins, counts, outputs)
            mx.eval([cache.state for cache in caches])
            on_pass()

    # All of them begin as the least and the greatest list do.
    num_common, caches = num_same(min(prompts), max(prompts)), make_prompt_cache(target.model)
    read(caches, range(len(prompts)), prompts[0][:num_common], 0)
    single = [deepcopy(caches) for _ in prompts]
    for number, prompt in enumerate(prompts):
        read(single[number], [number], prompt, num_common)
    if not can_batch(target.model):
        (alone,) = single
        return alone
    return [layer[0].merge(list(layer)) for layer in zip(*single, strict=True)]
