"""Speed of batches of texts: mlx-lm, plain and drafted decoding in this process, and servers.

A setting is a temperature, a length of the prompts and a batch size. In every setting the methods
decode the same batches in turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.bench.openai_server import OpenAiServer
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import summarise
from mlx_redrafter.bench.runs import (
    AUTO,
    PLAIN,
    STOCK,
    WARM_UP_PROMPT,
    Arm,
    CommonSettings,
    EncodedPrompt,
    TimedRun,
    Turn,
    drafted_arm,
    plain_arm,
    run_together,
    stock_arm,
)
from mlx_redrafter.bench.timing import MedianEstimate, OnProgress, estimate, rotated
from mlx_redrafter.bench.turns import arm_name, time_shapes
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.machines.leading import target_of

# Tokens of the texts that warm a method up.
WARM_UP_TOKENS = 8

# A method that times the texts of one batch, and returns each with its text.
BatchMethod = Callable[[Sequence[Turn]], list[tuple[TimedRun, str]]]


@dataclass(frozen=True)
class Setting:
    """Conditions that all methods share; without a context, prompts keep their lengths."""

    temp: float
    context: int | None
    batch_size: int

    def __str__(self) -> str:
        length = "" if self.context is None else f", {self.context} tokens"
        return f"T {self.temp:g}{length}, batch {self.batch_size}"


@dataclass(frozen=True)
class SpeedRow:
    """Results of one method in one setting.

    Attributes:
        batch_size: Texts at the same time.
        category: Category of the prompts; empty for all.
        tokens_per_second: Tokens of a whole batch per second, from its first token to its last;
            beside mlx-lm's batches, from the beginning of its prompts.
        speedup: The same, relative to the baseline's for the same batch.
        tokens_per_step: Tokens per forward pass and text; None for a server that reports none.
        acceptance_rate_by_position: Share of steps that accepted at least d drafts, at index d - 1.
        num_different: Number of texts that differ from plain decoding's, or mlx-lm's beside its
            batches; None if a difference is allowed.
    """

    setting: str
    batch_size: int
    method: str
    category: str
    tokens_per_second: MedianEstimate | None
    speedup: MedianEstimate | None
    tokens_per_step: float | None
    acceptance_rate_by_position: list[float]
    num_texts: int
    num_different: int | None


@dataclass(frozen=True)
class Comparison:
    """Methods to compare.

    Attributes:
        settings: Settings that all methods share, except the temperature.
        has_stock: Whether mlx-lm's batches are a method, to which speeds are then relative.
        cool_down: Seconds to rest before every batch.
    """

    settings: CommonSettings
    servers: Sequence[OpenAiServer] = ()
    plans: Sequence[DraftPlan] = ()
    has_stock: bool = False
    cool_down: float = 0.0

    @property
    def baseline(self) -> str:
        """Name of the method that speeds are relative to."""
        return STOCK if self.has_stock else PLAIN

    def methods(self, settings: CommonSettings, batch_size: int) -> dict[str, BatchMethod]:
        """Return the methods by name."""
        plans: dict[str, DraftPlan | None] = {AUTO: None}
        plans |= {arm_name(plan): plan for plan in self.plans}
        own: dict[str, BatchMethod] = {}
        if self.has_stock:
            own[STOCK] = partial(_decode_by_stock, settings)
        if batch_size == 1:
            own[PLAIN] = partial(_decode_one, PLAIN, plain_arm(settings))
            for name, plan in plans.items():
                own[name] = partial(_decode_one, name, drafted_arm(settings, plan))
        else:
            model, tokenizer = settings.model, settings.tokenizer
            own[PLAIN] = partial(_decode, PLAIN, Engine(model, tokenizer, None), settings, {})
            engine = Engine(model, tokenizer, settings.drafter)
            for name, plan in plans.items():
                options = {} if plan is None else plan.options
                own[name] = partial(_decode, name, engine, settings, options)
        return own | {f"{one.name} (server)": partial(_ask, settings, one) for one in self.servers}


Work = list[tuple[Setting, list[Turn]]]


def measure_speed(
    work: Work,
    compared: Comparison,
    recording: Recording,
    on_progress: OnProgress = lambda done, total: None,
) -> list[SpeedRow]:
    """Decode all batches with all methods, in interleaved runs.

    Batches that the recording already has are not repeated.
    """
    missing = [(setting, batch) for setting, batch in work if not recording.has(batch[0].key)]
    if missing:
        longest = max(len(turn.prompt.ids) for _, batch in work for turn in batch)
        time_shapes(compared.settings, longest, recording)
    methods: dict[str, BatchMethod] = {}
    current: Setting | None = None
    for done, (setting, batch) in enumerate(missing, start=len(work) - len(missing)):
        on_progress(done, len(work))
        mine = replace(compared.settings, temp=setting.temp)
        if setting != current:
            current, methods = setting, compared.methods(mine, setting.batch_size)
            _warm_up(compared, replace(mine, max_tokens=WARM_UP_TOKENS), batch)
        recording.add(_take_turn(methods, batch, mine, compared.cool_down))
    on_progress(len(work), len(work))
    return summarise_speed(recording.runs, [setting for setting, _ in work], compared.baseline)


def summarise_speed(
    runs: Sequence[TimedRun], settings: Iterable[Setting], baseline: str = PLAIN
) -> list[SpeedRow]:
    """Make a row per setting and method, and one per category if there are several."""
    rows = []
    categories = list(dict.fromkeys(run.category for run in runs))
    for setting in dict.fromkeys(settings):
        group = [run for run in runs if run.group == str(setting)]
        rows += _rows(setting, "", group, baseline)
        for category in categories if len(categories) > 1 and setting.batch_size == 1 else ():
            same = [run for run in group if run.category == category]
            rows += _rows(setting, category, same, baseline)
    return rows


def _rows(
    setting: Setting, category: str, runs: Sequence[TimedRun], baseline: str
) -> list[SpeedRow]:
    is_stock = baseline == STOCK
    before = _batches(runs, baseline, is_stock)
    rows = []
    # mlx-lm draws other random numbers.
    for row in summarise(runs, STOCK if is_stock and setting.temp == 0 else PLAIN):
        mine = _batches(runs, row.arm, is_stock)
        ratios = [mine[key] / before[key] for key in mine if key in before]
        rows.append(
            SpeedRow(
                str(setting),
                setting.batch_size,
                row.arm,
                category,
                estimate(list(mine.values())) if mine else None,
                estimate(ratios) if ratios else None,
                row.tokens_per_step,
                row.acceptance_rate_by_depth,
                row.num_texts,
                row.num_different,
            )
        )
    return rows


def _batch_of(run: TimedRun) -> tuple[int, int]:
    return run.block, run.repeat


def _batches(
    runs: Sequence[TimedRun], method: str, has_prompts: bool
) -> dict[tuple[int, int], float]:
    """Compute a method's tokens per second, by block and repeat, with or without the prompts."""
    batches: dict[tuple[int, int], list[TimedRun]] = {}
    for run in runs:
        if run.arm == method:
            batches.setdefault(_batch_of(run), []).append(run)
    speeds = {}
    for key, batch in batches.items():
        first = 0.0 if has_prompts else min(run.prompt_seconds for run in batch)
        last = max(run.prompt_seconds + run.decode_seconds for run in batch)
        num_tokens = sum(len(run.tokens) for run in batch) - (not has_prompts)
        if num_tokens > 0 and last > first:
            speeds[key] = num_tokens / (last - first)
    return speeds


def all_prompts(setting: Setting, prompts: Sequence[EncodedPrompt], repeats: int) -> Work:
    """Make batches of all prompts; the last one is filled with the first prompts."""
    size = setting.batch_size
    if size > len(prompts):
        raise ConfigError(
            f"expected at least {size} prompts for a batch of {size}, got {len(prompts)}"
        )
    num_batches = math.ceil(len(prompts) / size)
    return [
        (setting, _batch(setting, prompts, block, repeat))
        for repeat in range(repeats)
        for block in range(num_batches)
    ]


def next_prompts(setting: Setting, prompts: Sequence[EncodedPrompt], rounds: int) -> Work:
    """Make a batch of the next prompts for every round, from the first again after the last."""
    return [(setting, _batch(setting, prompts, block, 0)) for block in range(rounds)]


def _batch(
    setting: Setting, prompts: Sequence[EncodedPrompt], block: int, repeat: int
) -> list[Turn]:
    first = block * setting.batch_size
    numbers = range(first, first + setting.batch_size)
    return [Turn(str(setting), block, prompts[i % len(prompts)], repeat) for i in numbers]


def _warm_up(compared: Comparison, settings: CommonSettings, batch: Sequence[Turn]) -> None:
    """Let every method compile and allocate, with the beginnings of a batch's prompts.

    The whole prompts would be in the servers' caches afterwards.
    """
    short = []
    for turn in batch:
        ids, text = turn.prompt.ids[:WARM_UP_PROMPT], turn.prompt.text[:WARM_UP_PROMPT]
        short.append(replace(turn, prompt=replace(turn.prompt, ids=ids, text=text)))
    for method in compared.methods(settings, len(batch)).values():
        method(short)


def _decode_one(name: str, arm: Arm, batch: Sequence[Turn]) -> list[tuple[TimedRun, str]]:
    (turn,) = batch
    return run_together(name, ((0, response) for response in arm(turn.prompt.ids)), batch)


def _decode(
    name: str,
    engine: Engine,
    settings: CommonSettings,
    options: dict[str, Any],
    batch: Sequence[Turn],
) -> list[tuple[TimedRun, str]]:
    stream = engine.stream_batch(
        [turn.prompt.ids for turn in batch],
        batch_size=len(batch),
        max_tokens=settings.max_tokens,
        temp=settings.temp,
        seed=settings.seed,
        **options,
    )
    return run_together(name, stream, batch)


class _StockToken(NamedTuple):
    token: int
    text: str


def _decode_by_stock(settings: CommonSettings, batch: Sequence[Turn]) -> list[tuple[TimedRun, str]]:
    """Decode by mlx-lm's batches, and each token to text as this package does.

    On several machines one text follows the other: every rank would have to run mlx-lm's batches.
    """
    prompts = [turn.prompt.ids for turn in batch]
    if target_of(settings.model).devices:
        decode = stock_arm(settings)
        return run_together(
            STOCK, ((i, one) for i, ids in enumerate(prompts) for one in decode(ids)), batch
        )
    return run_together(STOCK, _stock_batches(settings, prompts), batch)


def _stock_batches(
    settings: CommonSettings, prompts: list[list[int]]
) -> Iterator[tuple[int, _StockToken]]:
    mx.random.seed(settings.seed)
    batches = BatchGenerator(
        settings.model,
        max_tokens=settings.max_tokens,
        stop_tokens=[[token] for token in sorted(settings.tokenizer.eos_token_ids)],
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
            num_left -= response.finish_reason is not None
            yield number, _StockToken(response.token, readers[number].last_segment)
    batches.close()


def _ask(
    settings: CommonSettings, server: OpenAiServer, batch: Sequence[Turn]
) -> list[tuple[TimedRun, str]]:
    texts = server.write(
        [turn.prompt.text for turn in batch],
        settings.tokenizer.has_chat_template,
        settings.max_tokens,
        settings.temp,
        settings.seed,
    )
    found = []
    for turn, one in zip(batch, texts, strict=True):
        run = TimedRun(
            group=turn.group,
            block=turn.block,
            arm=f"{server.name} (server)",
            prompt=turn.prompt.name,
            category=turn.prompt.category,
            repeat=turn.repeat,
            prompt_tokens=len(turn.prompt.ids),
            prompt_seconds=one.first,
            decode_seconds=one.last - one.first,
            tokens=settings.tokenizer.encode(one.text, add_special_tokens=False),
            # A server does not report how many drafts each of its steps accepted.
            accepted_counts=[] if one.steps is None else [one.steps],
            num_verified=0,
            num_unmerged=0,
        )
        found.append((run, one.text))
    return found


def _take_turn(
    methods: Mapping[str, BatchMethod],
    batch: Sequence[Turn],
    settings: CommonSettings,
    cool_down: float,
) -> list[TimedRun]:
    found: dict[str, list[tuple[TimedRun, str]]] = {}
    for name in rotated(list(methods), batch[0].repeat + batch[0].block):
        time.sleep(cool_down)
        found[name] = methods[name](batch)
    runs = []
    for texts in found.values():
        for (run, text), (plain, plain_text) in zip(texts, found[PLAIN], strict=True):
            is_served = run.arm.endswith(" (server)")
            if is_served and _is_equal(settings, text, plain, plain_text):
                # A server sends text. An equal text has the tokens of plain decoding.
                run = replace(run, tokens=plain.tokens)
            runs.append(run)
    return runs


def _is_equal(settings: CommonSettings, text: str, plain: TimedRun, plain_text: str) -> bool:
    """Compare a server's text with the plain one; some servers write more than max_tokens."""
    found, expected = (_bare(settings.tokenizer, one) for one in (text, plain_text))
    was_cut = len(plain.tokens) == settings.max_tokens
    return found.startswith(expected) if was_cut else found == expected


def _bare(tokenizer: TokenizerWrapper, text: str) -> str:
    """Return a text without the marks of reasoning, which servers cut out, and the space there."""
    if not tokenizer.has_thinking:
        return text
    for mark in (tokenizer.think_start, tokenizer.think_end):
        text = text.replace(mark, "")
    return "".join(text.split())
