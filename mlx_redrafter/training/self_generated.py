"""Texts that the target writes itself: what a drafter should know is how the target writes.

Half of them are greedy, half sampled at the temperature of use (design: ``DataOptions``). Written
in rounds, each stored whole in a file of its own, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.files import load_arrays, save_arrays

ROUND_SIZE = 64
BATCH_SIZE = 32
# Texts that continue a given one start from 4 to this many tokens more of it.
LONGEST_BEGINNING = 28

OnTokens = Callable[[int], None]


class Job(NamedTuple):
    """One text to write: what it begins with, token ids, and the temperature, 0 for greedy."""

    prompt: list[int]
    temp: float


class AnswerLimits(NamedTuple):
    """When to stop.

    Attributes:
        answer_tokens: Most tokens of one answer.
        sequence_length: Most tokens of a prompt and its answer.
        total_tokens: Enough tokens of all answers, None to do every job.
    """

    answer_tokens: int
    sequence_length: int
    total_tokens: int | None = None


class Writer:
    """Lets a target write.

    Args:
        model: The target.
        tokenizer: Its tokenizer, for the stop tokens.
        seed: Of the sampling.
    """

    def __init__(self, model: nn.Module, tokenizer: TokenizerWrapper, seed: int):
        self.model = model
        self.stop_tokens = sorted(tokenizer.eos_token_ids)
        self.seed = seed

    def write(
        self,
        jobs: Iterator[Job],
        limits: AnswerLimits,
        folder: Path,
        name: str,
        on_tokens: OnTokens,
    ) -> list[TokenSequence]:
        """Write texts until there are enough or no more jobs.

        Seeds MLX's global random state. Rounds that ``folder`` holds already are read instead.

        Args:
            jobs: What to write; the same ones in the same order when a run is resumed.
            limits: When to stop.
            folder: Where the rounds are stored.
            name: Of their files.
            on_tokens: Called with the tokens written so far, answers only.

        Returns:
            Prompts with their answers, of which the answers are trained on.

        Raises:
            UnsupportedTargetError: mlx-lm cannot decode this model in batches.
        """
        sequences: list[TokenSequence] = []
        written = 0
        number = 0
        while limits.total_tokens is None or written < limits.total_tokens:
            round_jobs = list(islice(jobs, ROUND_SIZE))
            if not round_jobs:
                break
            path = folder / f"{name}-{number:05d}.safetensors"
            if not path.exists():
                save_arrays(path, pack(self._write_round(round_jobs, limits, number)))
            texts = unpack(load_arrays(path))
            sequences += texts
            written += sum(int(text.is_trained.sum()) for text in texts)
            number += 1
            on_tokens(written)
        return sequences

    def _write_round(
        self, jobs: list[Job], limits: AnswerLimits, number: int
    ) -> list[TokenSequence]:
        answers: dict[int, list[int]] = {}
        for group, temp in enumerate(sorted({job.temp for job in jobs})):
            mx.random.seed(self.seed + 1_000_003 * number + group)
            chosen = [i for i, job in enumerate(jobs) if job.temp == temp]
            prompts = [jobs[i].prompt for i in chosen]
            texts = self._generate(prompts, temp, limits)
            answers.update(zip(chosen, texts, strict=True))
        return [_as_sequence(job.prompt, answers[i]) for i, job in enumerate(jobs)]

    def _generate(
        self, prompts: list[list[int]], temp: float, limits: AnswerLimits
    ) -> list[list[int]]:
        room = [
            min(limits.answer_tokens, limits.sequence_length - len(prompt)) for prompt in prompts
        ]
        try:
            generator: Any = BatchGenerator(
                self.model,
                stop_tokens=[[token] for token in self.stop_tokens],
                sampler=make_sampler(temp=temp),
                completion_batch_size=BATCH_SIZE,
            )
        except (ValueError, NotImplementedError) as error:
            raise UnsupportedTargetError(
                f"mlx-lm cannot decode this model in batches ({error}); give texts with --data "
                "and --self-written 0"
            ) from error
        try:
            ids = generator.insert(prompts, room)
            answers: dict[int, list[int]] = {uid: [] for uid in ids}
            while responses := generator.next_generated():
                for response in responses:
                    answers[response.uid].append(int(response.token))
        finally:
            generator.close()
        return [answers[uid] for uid in ids]


def _as_sequence(prompt: list[int], answer: list[int]) -> TokenSequence:
    tokens = np.array([*prompt, *answer], dtype=np.int32)
    return TokenSequence(tokens, np.arange(len(tokens)) >= len(prompt))


class PromptSource(NamedTuple):
    """Where prompts come from.

    Attributes:
        tokens: Token ids.
        is_fixed: Use all of them; otherwise a beginning of random length, at least 4.
    """

    tokens: list[int]
    is_fixed: bool

    def prompt(self, rng: np.random.Generator) -> list[int]:
        """Token ids of one prompt."""
        if self.is_fixed:
            return self.tokens
        return self.tokens[: int(rng.integers(4, 4 + LONGEST_BEGINNING))]


def plan_jobs(
    sources: Sequence[PromptSource], temp: float, num_passes: int, seed: int
) -> Iterator[Job]:
    """Jobs that take every source in turn, half of them greedy, half sampled.

    After two passes the greedy answers of fixed prompts would be repetitions, so the rest of those
    is sampled.

    Args:
        sources: Where prompts come from.
        temp: Temperature of the sampled half.
        num_passes: How often every source is used.
        seed: Of the random lengths.
    """
    rng = np.random.default_rng(seed)
    for turn in range(num_passes):
        for number, source in enumerate(sources):
            is_greedy = (number + turn) % 2 == 0 and (turn < 2 or not source.is_fixed)
            yield Job(source.prompt(rng), 0.0 if is_greedy else temp)


def pack(sequences: Sequence[TokenSequence]) -> dict[str, mx.array]:
    """Arrays that `unpack` makes the same sequences of."""
    return {
        "tokens": mx.array(np.concatenate([s.tokens for s in sequences])),
        "is_trained": mx.array(np.concatenate([s.is_trained for s in sequences])),
        "starts": mx.array(np.cumsum([0] + [len(s) for s in sequences]).astype(np.int32)),
    }


def unpack(arrays: dict[str, mx.array]) -> list[TokenSequence]:
    """The sequences of `pack`."""
    tokens, is_trained = np.array(arrays["tokens"]), np.array(arrays["is_trained"])
    starts = np.array(arrays["starts"])
    return [TokenSequence(tokens[a:b], is_trained[a:b]) for a, b in pairwise(starts)]
