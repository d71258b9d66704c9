"""Speed of batch generation: mlx-lm's batches, this package's plain ones, and drafted ones.

Axes: B sequences in a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.bench.runs import (
    AUTO,
    PLAIN,
    STOCK,
    CommonSettings,
    EncodedPrompt,
    stock_arm,
)
from mlx_redrafter.bench.timing import MedianEstimate, OnProgress, estimate, take_turns
from mlx_redrafter.bench.turns import arm_name, part_of, reference_arm
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.machines.leading import target_of

# Rounds per batch size that are not recorded.
WARM_UP = 1

# A method of batch generation: from prompts to a stream of (number of the sequence, its next token,
# its tokens per step so far).
BatchMethod = Callable[[list[list[int]]], Iterator[tuple[int, int, float]]]


@dataclass(frozen=True)
class Throughput:
    """Speed of one method with one batch size, prompts included.

    Attributes:
        way: Name of the method.
        batch_size: Sequences in the batch, B.
        throughput: Tokens per second of all sequences together.
        latency: Seconds per token of one sequence.
        speedup: Throughput relative to mlx-lm's batches in the same round.
        tokens_per_step: Mean over the sequences of their tokens per forward pass.
        num_different: Number of texts that differ from those of `reference_arm`. None for that
            method itself, and for mlx-lm's with sampling, which draws other random numbers.
    """

    way: str
    batch_size: int
    throughput: MedianEstimate
    latency: MedianEstimate
    speedup: MedianEstimate
    tokens_per_step: float
    num_different: int | None


@dataclass
class _BatchTexts:
    """Texts of one method, round by round, and their tokens per step."""

    texts: list[list[list[int]]] = field(default_factory=list)
    tokens_per_step: list[float] = field(default_factory=list)


def measure_throughput(
    settings: CommonSettings,
    plans: Sequence[DraftPlan],
    prompts: Sequence[EncodedPrompt],
    batch_sizes: Sequence[int],
    rounds: int,
    on_progress: OnProgress = lambda done, total: None,
    on_found: Callable[[list[Throughput]], None] = lambda found: None,
) -> list[Throughput]:
    """Generate batches with every method, in interleaved rounds.

    Every round uses other prompts, as long as there are enough.

    Args:
        settings: Settings of all methods.
        plans: Fixed plans.
        prompts: Prompts; each round uses the next B, starting again after the last.
        batch_sizes: Batch sizes.
        rounds: Samples of each number.
        on_progress: Callback for the number of rounds done and their total.
        on_found: Callback for all results so far, after each batch size.
    """
    found: list[Throughput] = []
    turns = WARM_UP + rounds
    methods = _methods(settings, plans)
    for number, size in enumerate(batch_sizes):
        runs = {name: _BatchTexts() for name in methods}
        jobs = {name: _job(method, runs[name], prompts, size) for name, method in methods.items()}
        part = part_of(on_progress, number * turns, len(batch_sizes) * turns)
        samples = take_turns(jobs, rounds, WARM_UP, on_progress=part)
        stock = samples[STOCK]
        for name, values in samples.items():
            is_comparable = name != reference_arm(settings) and (name != STOCK or not settings.temp)
            expected = runs[reference_arm(settings)].texts
            found.append(
                Throughput(
                    name,
                    size,
                    estimate([1 / value for value in values]),
                    estimate([size * value for value in values]),
                    estimate([one / value for one, value in zip(stock, values, strict=True)]),
                    sum(runs[name].tokens_per_step) / len(runs[name].tokens_per_step),
                    _num_different(runs[name].texts, expected) if is_comparable else None,
                )
            )
        on_found(found)
    return found


def _methods(settings: CommonSettings, plans: Sequence[DraftPlan]) -> dict[str, BatchMethod]:
    model, tokenizer = settings.model, settings.tokenizer
    drafted = Engine(model, tokenizer, settings.drafter)
    return {
        STOCK: _stock_method(settings),
        PLAIN: _own_method(settings, Engine(model, tokenizer, None), {}),
        AUTO: _own_method(settings, drafted, {}),
        **{arm_name(plan): _own_method(settings, drafted, plan.options) for plan in plans},
    }


def _stock_method(settings: CommonSettings) -> BatchMethod:
    """Generate with mlx-lm's batches, decoding each token to text as this package does.

    On several machines one text follows the other: every rank would have to run mlx-lm's batches.
    """
    decode = stock_arm(settings)

    def write_in_turn(prompts: list[list[int]]) -> Iterator[tuple[int, int, float]]:
        for number, prompt in enumerate(prompts):
            for response in decode(prompt):
                yield number, response.token, 1.0

    def write(prompts: list[list[int]]) -> Iterator[tuple[int, int, float]]:
        mx.random.seed(settings.seed)
        stops = [[token] for token in sorted(settings.tokenizer.eos_token_ids)]
        batches = BatchGenerator(
            settings.model,
            max_tokens=settings.max_tokens,
            stop_tokens=stops,
            sampler=make_sampler(settings.temp),
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
        )
        numbers = {uid: number for number, uid in enumerate(batches.insert(prompts))}
        readers = [settings.tokenizer.detokenizer for _ in prompts]
        num_left = len(prompts)
        while num_left:
            for response in batches.next()[1]:
                number = numbers[response.uid]
                readers[number].add_token(response.token)
                _ = readers[number].last_segment
                num_left -= response.finish_reason is not None
                yield number, response.token, 1.0
        batches.close()

    return write_in_turn if target_of(settings.model).devices else write


def _own_method(settings: CommonSettings, engine: Engine, options: dict[str, Any]) -> BatchMethod:
    def write(prompts: list[list[int]]) -> Iterator[tuple[int, int, float]]:
        stream = engine.stream_batch(
            prompts,
            batch_size=len(prompts),
            max_tokens=settings.max_tokens,
            temp=settings.temp,
            seed=settings.seed,
            **options,
        )
        for number, response in stream:
            yield number, response.token, response.tokens_per_step or 1.0

    return write


def _job(
    method: BatchMethod, runs: _BatchTexts, prompts: Sequence[EncodedPrompt], batch_size: int
) -> Callable[[], float]:
    """Return a job that generates one batch and returns its seconds per token."""

    def job() -> float:
        first = len(runs.texts) * batch_size
        ids = [prompts[(first + i) % len(prompts)].ids for i in range(batch_size)]
        texts: list[list[int]] = [[] for _ in ids]
        per_step = [1.0] * batch_size
        start = time.perf_counter()
        for number, token, per_step[number] in method(ids):
            texts[number].append(token)
        seconds = time.perf_counter() - start
        runs.texts.append(texts)
        runs.tokens_per_step.append(sum(per_step) / batch_size)
        return seconds / sum(map(len, texts))

    return job


def _num_different(texts: list[list[list[int]]], expected: list[list[list[int]]]) -> int:
    pairs = zip(texts, expected, strict=True)
    return sum(
        one != other for batch, others in pairs for one, other in zip(batch, others, strict=True)
    )
