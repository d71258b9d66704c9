"""What several texts at once gain: mlx-lm's batches, ours without drafts, and with them.

Axes: B texts at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.bench.runs import AUTO, PLAIN, STOCK, EncodedPrompt, Setting
from mlx_redrafter.bench.timing import Estimate, OnProgress, estimate, take_turns
from mlx_redrafter.bench.turns import arm_name, part_of, reference_arm
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.engine import Engine

WARM_UP = 1

# A way of decoding: from prompts to numbers of texts and their tokens, each as it comes, with the
# tokens per step of that text so far.
Way = Callable[[list[list[int]]], Iterator[tuple[int, int, float]]]


@dataclass(frozen=True)
class Throughput:
    """Speed of one way with so many texts at once, prompts included.

    Attributes:
        way: Name of the way.
        batch_size: Texts at once, B.
        throughput: Tokens per second of all texts together.
        latency: Seconds per token of one text.
        speedup: Throughput by that of mlx-lm's batches in the same round.
        tokens_per_step: Mean over the texts of their tokens per forward pass.
        num_different: Texts that are not those of `reference_arm`; None for that way itself, and
            for mlx-lm's with a temperature, whose noise is another.
    """

    way: str
    batch_size: int
    throughput: Estimate
    latency: Estimate
    speedup: Estimate
    tokens_per_step: float
    num_different: int | None


@dataclass
class _Runs:
    """What one way has written, round by round."""

    texts: list[list[list[int]]] = field(default_factory=list)
    tokens_per_step: list[float] = field(default_factory=list)


def measure_throughput(
    setting: Setting,
    plans: Sequence[DraftPlan],
    prompts: Sequence[EncodedPrompt],
    batch_sizes: Sequence[int],
    rounds: int,
    on_progress: OnProgress = lambda done, total: None,
    on_found: Callable[[list[Throughput]], None] = lambda found: None,
) -> list[Throughput]:
    """Write texts in every way, in turns; every round has other prompts, where there are enough.

    Args:
        setting: Settings of all ways.
        plans: Fixed plans.
        prompts: Prompts, of which B are taken for a round, from the first on again after the last.
        batch_sizes: Numbers of texts at once.
        rounds: Samples of each number.
        on_progress: Callback for the rounds done and their number.
        on_found: Callback for all that is found so far, after each number of texts.
    """
    found: list[Throughput] = []
    turns = WARM_UP + rounds
    ways = _ways(setting, plans)
    for number, size in enumerate(batch_sizes):
        runs = {name: _Runs() for name in ways}
        jobs = {name: _job(way, runs[name], prompts, size) for name, way in ways.items()}
        part = part_of(on_progress, number * turns, len(batch_sizes) * turns)
        samples = take_turns(jobs, rounds, WARM_UP, on_progress=part)
        stock = samples[STOCK]
        for name, values in samples.items():
            is_comparable = name != reference_arm(setting) and (name != STOCK or not setting.temp)
            expected = runs[reference_arm(setting)].texts
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


def _ways(setting: Setting, plans: Sequence[DraftPlan]) -> dict[str, Way]:
    model, tokenizer = setting.model, setting.tokenizer
    drafted = Engine(model, tokenizer, setting.drafter)
    return {
        STOCK: _stock_way(setting),
        PLAIN: _own_way(setting, Engine(model, tokenizer, None), {}),
        AUTO: _own_way(setting, drafted, {}),
        **{arm_name(plan): _own_way(setting, drafted, plan.options) for plan in plans},
    }


def _stock_way(setting: Setting) -> Way:
    """mlx-lm's batches, whose tokens are read as text one by one, as ours are."""

    def write(prompts: list[list[int]]) -> Iterator[tuple[int, int, float]]:
        mx.random.seed(setting.seed)
        stops = [[token] for token in sorted(setting.tokenizer.eos_token_ids)]
        batches = BatchGenerator(
            setting.model,
            max_tokens=setting.max_tokens,
            stop_tokens=stops,
            sampler=make_sampler(setting.temp),
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
        )
        numbers = {uid: number for number, uid in enumerate(batches.insert(prompts))}
        readers = [setting.tokenizer.detokenizer for _ in prompts]
        num_left = len(prompts)
        while num_left:
            for response in batches.next()[1]:
                number = numbers[response.uid]
                readers[number].add_token(response.token)
                _ = readers[number].last_segment
                num_left -= response.finish_reason is not None
                yield number, response.token, 1.0
        batches.close()

    return write


def _own_way(setting: Setting, engine: Engine, options: dict[str, Any]) -> Way:
    def write(prompts: list[list[int]]) -> Iterator[tuple[int, int, float]]:
        stream = engine.stream_batch(
            prompts,
            batch_size=len(prompts),
            max_tokens=setting.max_tokens,
            temp=setting.temp,
            seed=setting.seed,
            couple=setting.couple,
            **options,
        )
        for number, response in stream:
            yield number, response.token, response.tokens_per_step or 1.0

    return write


def _job(
    way: Way, runs: _Runs, prompts: Sequence[EncodedPrompt], batch_size: int
) -> Callable[[], float]:
    """A round of one way: seconds by the tokens of all texts together."""

    def job() -> float:
        first = len(runs.texts) * batch_size
        ids = [prompts[(first + i) % len(prompts)].ids for i in range(batch_size)]
        texts: list[list[int]] = [[] for _ in ids]
        per_step = [1.0] * batch_size
        start = time.perf_counter()
        for number, token, per_step[number] in way(ids):
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
