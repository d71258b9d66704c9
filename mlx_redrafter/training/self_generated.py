"""Self-generated training data: texts by the target, which the drafter learns to predict.

Half of the texts are greedy, half are sampled at the temperature in `DataOptions`. The target
generates them in rounds. Each round is stored whole in its own file, so that an interrupted run
continues with the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.decoding.sampling import Sampler
from mlx_redrafter.training.data import TokenSequence
from mlx_redrafter.training.files import load_arrays, save_arrays
from mlx_redrafter.training_options import DataOptions

# Number of texts per file.
ROUND_SIZE = 64
# Number of texts that the target decodes at once.
BATCH_SIZE = 32
# Minimum length of the beginning of a text that serves as a prompt, in tokens.
SHORTEST_BEGINNING = 4
# Number of different lengths of the beginnings of a text.
NUM_BEGINNINGS = 28

OnTokens = Callable[[int], None]


class GenerationJob(NamedTuple):
    """One text to generate."""

    prompt: list[int]
    temp: float


class TextGenerator:
    """Generator of texts by the target."""

    def __init__(self, model: nn.Module, stop_tokens: Iterable[int], seed: int):
        self.model = model
        self.stop_tokens = sorted(stop_tokens)
        self.seed = seed

    def generate(
        self,
        jobs: Iterator[GenerationJob],
        options: DataOptions,
        total_tokens: int | None,
        folder: Path,
        name: str,
        on_tokens: OnTokens,
    ) -> list[TokenSequence]:
        """Generate prompts with answers until there are enough tokens or no more jobs.

        The answers have ``total_tokens`` tokens or a few more, if it is not None.

        Seeds MLX's global random state. Rounds whose file exists in ``folder``, named by ``name``
        and a number, are read instead, so a resumed run must give the same jobs in the same order.
        ``on_tokens`` receives the number of tokens generated so far, without the prompts.
        """
        sequences: list[TokenSequence] = []
        num_generated = 0
        number = 0
        while total_tokens is None or num_generated < total_tokens:
            round_jobs = list(islice(jobs, ROUND_SIZE))
            if not round_jobs:
                break
            path = folder / f"{name}-{number:05d}.safetensors"
            if not path.exists():
                save_arrays(path, pack_sequences(self.generate_round(round_jobs, options, number)))
            texts = unpack_sequences(load_arrays(path)[0])
            sequences += texts
            num_generated += sum(int(text.is_trained.sum()) for text in texts)
            number += 1
            on_tokens(num_generated)
        return sequences

    def generate_round(
        self, jobs: Sequence[GenerationJob], options: DataOptions, number: int
    ) -> list[TokenSequence]:
        """Generate the texts of one round. Seeds MLX's global random state."""
        answers: dict[int, list[int]] = {}
        for group, temp in enumerate(sorted({job.temp for job in jobs})):
            mx.random.seed(self.seed + 1_000_003 * number + group)
            chosen = [i for i, job in enumerate(jobs) if job.temp == temp]
            prompts = [jobs[i].prompt for i in chosen]
            texts = self._generate_answers(prompts, temp, options)
            answers.update(zip(chosen, texts, strict=True))
        return [_as_sequence(job.prompt, answers[i]) for i, job in enumerate(jobs)]

    def _generate_answers(
        self, prompts: list[list[int]], temp: float, options: DataOptions
    ) -> list[list[int]]:
        most = options.answer_tokens
        room = [min(most, options.sequence_length - len(prompt)) for prompt in prompts]
        sampler = make_sampler(temp=temp)
        if not all(hasattr(layer, "merge") for layer in make_prompt_cache(self.model)):
            # mlx-lm cannot decode such a model in batches.
            return list(map(partial(self._answer, sampler=sampler), prompts, room))
        generator: Any = BatchGenerator(
            self.model,
            stop_tokens=[[token] for token in self.stop_tokens],
            sampler=sampler,
            completion_batch_size=BATCH_SIZE,
        )
        try:
            ids = generator.insert(prompts, room)
            answers: dict[int, list[int]] = {uid: [] for uid in ids}
            while responses := generator.next_generated():
                for response in responses:
                    answers[response.uid].append(int(response.token))
        finally:
            generator.close()
        return [answers[uid] for uid in ids]

    def _answer(self, prompt: list[int], most: int, sampler: Sampler) -> list[int]:
        """Generate an answer of at most ``most`` tokens, its stop token included."""
        answer: list[int] = []
        for token, _ in generate_step(
            mx.array(prompt), self.model, max_tokens=most, sampler=sampler
        ):
            answer.append(int(token))
            if answer[-1] in self.stop_tokens:
                break
        return answer


def _as_sequence(prompt: list[int], answer: list[int]) -> TokenSequence:
    tokens = np.array([*prompt, *answer], dtype=np.int32)
    return TokenSequence(tokens, np.arange(len(tokens)) >= len(prompt))


class PromptSource(NamedTuple):
    """A source of prompts.

    Attributes:
        tokens: Token ids.
        is_fixed: Whether the prompt is always all of ``tokens``; otherwise the prompt is a
            beginning of random length.
    """

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

    A third greedy answer to a fixed prompt would repeat an earlier one, so fixed prompts are only
    sampled after two passes.
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
    """Split the arrays of `pack_sequences` into sequences."""
    tokens, is_trained = np.array(arrays["tokens"]), np.array(arrays["is_trained"])
    starts = np.array(arrays["starts"])
    return [TokenSequence(tokens[a:b], is_trained[a:b]) for a, b in pairwise(starts)]
