"""Self-generated training data: texts by the target, which the drafter learns to predict.

Half of them are greedy, half are sampled. The target generates them in rounds, the texts of a round
at once. Each round is stored whole in its own file, so that an interrupted run continues with the
next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.files import load_arrays, save_arrays
from mlx_redrafter.training.text_batch import OnTokens, answer, can_batch
from mlx_redrafter.training_options import DataOptions

# Maximum number of texts of a round.
ROUND_SIZE = 128
# Maximum size of the caches of a round, in bytes.
ROUND_BYTES = 2**32
# Minimum length of the beginning of a text that serves as a prompt, in tokens.
SHORTEST_BEGINNING = 4
# Number of different lengths of the beginnings of a text.
NUM_BEGINNINGS = 28


class GenerationJob(NamedTuple):
    prompt: list[int]
    temp: float


class TextGenerator:
    def __init__(self, model: nn.Module, stop_tokens: Iterable[int], seed: int):
        self.model = model
        self.stop_tokens = sorted(stop_tokens)
        self.seed = seed
        self.round_size = count_texts(model)

    def rounds(
        self,
        jobs: Iterator[GenerationJob],
        options: DataOptions,
        total_tokens: int | None,
        folder: Path,
        name: str,
        on_tokens: OnTokens,
        most_texts: int = ROUND_SIZE,
    ) -> Iterator[list[TokenSequence]]:
        """Generate rounds of prompts with answers until there are enough tokens or no more jobs.

        The answers have ``total_tokens`` tokens or those of a text more, if it is not None. A round
        has at most ``most_texts`` texts.

        Seeds MLX's global random state. Rounds whose file exists in ``folder``, named by ``name``
        and a number, are read instead, so a resumed run must give the same jobs in the same order.
        ``on_tokens`` receives the number of tokens generated so far, without the prompts.
        """
        num_texts = num_generated = number = 0
        while total_tokens is None or num_generated < total_tokens:
            size = min(self.round_size, most_texts)
            if total_tokens is not None:
                mean = num_generated / num_texts if num_texts else options.answer_tokens
                size = min(size, math.ceil((total_tokens - num_generated) / max(1, mean)))
            round_jobs = list(islice(jobs, size))
            if not round_jobs:
                break
            path = folder / f"{name}-{number:05d}.safetensors"
            if not path.exists():
                report = partial(report_after, num_generated, on_tokens)
                found = self.generate_round(round_jobs, options, number, report)
                save_arrays(path, pack_sequences(found))
            texts = unpack_sequences(load_arrays(path)[0])
            num_texts += len(texts)
            num_generated += sum(int(text.is_trained.sum()) for text in texts)
            number += 1
            on_tokens(num_generated)
            yield texts

    def generate_round(
        self,
        jobs: Sequence[GenerationJob],
        options: DataOptions,
        number: int,
        on_tokens: OnTokens = lambda count: None,
    ) -> list[TokenSequence]:
        mx.random.seed(self.seed + 1_000_003 * number)
        answers: list[list[int]] = []
        # mlx-lm cannot decode some models in batches.
        size = len(jobs) if can_batch(self.model) else 1
        for first in range(0, len(jobs), size):
            part = jobs[first : first + size]
            answers += answer(
                self.model,
                [job.prompt for job in part],
                [job.temp for job in part],
                [min(options.answer_tokens, options.sequence_length - len(j.prompt)) for j in part],
                self.stop_tokens,
                partial(report_after, sum(map(len, answers)), on_tokens),
            )
        sequences = []
        for job, reply in zip(jobs, answers, strict=True):
            tokens = np.array([*job.prompt, *reply], dtype=np.int32)
            sequences.append(TokenSequence(tokens, np.arange(len(tokens)) >= len(job.prompt)))
        return sequences


def count_texts(model: nn.Module) -> int:
    """Count the texts of a round, whose caches fit into `ROUND_BYTES`."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 1), dtype=mx.int32), cache=caches))
    # A cache makes room for 256 tokens at once, about those of an answer.
    return max(1, min(ROUND_SIZE, ROUND_BYTES // (1 + sum(cache.nbytes for cache in caches))))


def report_after(before: int, on_tokens: OnTokens, count: int) -> None:
    on_tokens(before + count)


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


def pack_sequences(sequences: Sequence[TokenSequence]) -> dict[str, mx.array]:
    """Join sequences into arrays; the inverse of `unpack_sequences`."""
    return {
        "tokens": mx.array(np.concatenate([s.tokens for s in sequences])),
        "is_trained": mx.array(np.concatenate([s.is_trained for s in sequences])),
        "starts": mx.array(np.cumsum([0] + [len(s) for s in sequences]).astype(np.int32)),
    }


def unpack_sequences(arrays: dict[str, mx.array]) -> list[TokenSequence]:
    tokens, is_trained = np.array(arrays["tokens"]), np.array(arrays["is_trained"])
    starts = np.array(arrays["starts"])
    return [TokenSequence(tokens[a:b], is_trained[a:b]) for a, b in pairwise(starts)]
