"""Speed of batches of texts: mlx-lm, plain and drafted decoding in this process, and servers.

A setting is a temperature, a length of the prompts and a batch size. In every setting the methods
decode the same batches in turns.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.bench.openai_server import OpenAiServer
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import Row, divide, ratios, summarise
from mlx_redrafter.bench.runs import (
    AUTO,
    PLAIN,
    STOCK,
    STOCK_DRAFT,
    CommonSettings,
    EncodedPrompt,
    TimedRun,
    Turn,
    drafted_arm,
    plain_arm,
    run_together,
    stock_arm,
)
from mlx_redrafter.bench.timing import OnProgress
from mlx_redrafter.bench.turns import (
    Interleaving,
    Method,
    TimedTexts,
    arm_name,
    decode_in_turns,
    one_by_one,
    time_shapes,
)
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.machines.leading import target_of


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
class Comparison:
    """Methods to compare.

    Attributes:
        settings: Settings that all methods share, except the temperature.
        stock: Decoding by mlx-lm, to which speeds are then relative: as a batch, or one text after
            the other; "" leaves it out.
        draft_model: Draft model of mlx-lm's own speculative decoding, to compare as well.
        cool_down: Seconds to rest before every batch.
    """

    settings: CommonSettings
    servers: Sequence[OpenAiServer] = ()
    plans: Sequence[DraftPlan] = ()
    stock: Literal["", "batch", "one by one"] = ""
    draft_model: nn.Module | None = None
    cool_down: float = 0.0

    @property
    def baseline(self) -> str:
        return STOCK if self.stock else PLAIN

    def methods(self, batch_size: int, settings: CommonSettings) -> dict[str, Method]:
        plans: dict[str, DraftPlan | None] = {AUTO: None}
        plans |= {arm_name(plan): plan for plan in self.plans}
        own: dict[str, Method] = {}
        if self.stock == "batch":
            own[STOCK] = partial(_decode_by_stock, settings)
        elif self.stock:
            own[STOCK] = partial(one_by_one, STOCK, stock_arm(settings))
        if self.draft_model is not None:
            arm = stock_arm(settings, self.draft_model)
            own[STOCK_DRAFT] = partial(one_by_one, STOCK_DRAFT, arm)
        if batch_size == 1:
            own[PLAIN] = partial(one_by_one, PLAIN, plain_arm(settings))
            for name, plan in plans.items():
                own[name] = partial(one_by_one, name, drafted_arm(settings, plan))
        else:
            model, tokenizer = settings.model, settings.tokenizer
            own[PLAIN] = partial(decode_batch, PLAIN, Engine(model, tokenizer, None), settings, {})
            engine = Engine(model, tokenizer, settings.drafter)
            for name, plan in plans.items():
                options = {} if plan is None else plan.options
                own[name] = partial(decode_batch, name, engine, settings, options)
        return own | {f"{one.name} (server)": partial(_ask, settings, one) for one in self.servers}


# Batches by the setting that they are decoded in.
Work = Mapping[Setting, Sequence[Sequence[Turn]]]


def measure_speed(
    work: Work, compared: Comparison, recording: Recording, on_progress: OnProgress
) -> list[Row]:
    """Decode all batches with all methods, as `decode_in_turns` does.

    Return a row per setting and method, and one per category if there are several.
    """
    parts = []
    for setting, batches in work.items():
        settings = replace(compared.settings, temp=setting.temp)
        make_methods = partial(compared.methods, setting.batch_size)
        parts.append(Interleaving(make_methods, settings, batches, partial(_finish, settings)))
    turns = [turn for batches in work.values() for batch in batches for turn in batch]
    longest = max(len(turn.prompt.ids) for turn in turns)
    prepare = partial(time_shapes, compared.settings, longest, recording)
    decode_in_turns(parts, recording, compared.cool_down, on_progress, prepare)
    rows: list[Row] = []
    for setting in work:
        group = [run for run in recording.runs if run.group == str(setting)]
        categories = divide(group) if setting.batch_size == 1 else {"": group}
        for category, runs in categories.items():
            rows += _rows(setting, category, runs, compared)
    return rows


def _rows(
    setting: Setting, category: str, runs: Sequence[TimedRun], compared: Comparison
) -> Iterator[Row]:
    has_prompts = compared.stock == "batch"
    before = _batches(runs, compared.baseline, has_prompts)
    for row in summarise(runs, setting.temp):
        mine = _batches(runs, row.arm, has_prompts)
        yield replace(
            row,
            tokens_per_second=ratios((key[0], speed, 1.0) for key, speed in mine.items()),
            speedup=ratios((key[0], mine[key], before[key]) for key in mine if key in before),
            setting=str(setting),
            batch_size=setting.batch_size,
            category=category,
        )


def _batches(
    runs: Sequence[TimedRun], method: str, has_prompts: bool
) -> dict[tuple[int, int], float]:
    """Compute a method's tokens per second, by block and repeat, with or without the prompts."""
    batches: dict[tuple[int, int], list[TimedRun]] = {}
    for run in runs:
        if run.arm == method:
            batches.setdefault((run.block, run.repeat), []).append(run)
    speeds = {}
    for key, batch in batches.items():
        first = 0.0 if has_prompts else min(run.prompt_seconds for run in batch)
        last = max(run.prompt_seconds + run.decode_seconds for run in batch)
        num_tokens = sum(len(run.tokens) for run in batch) - (not has_prompts)
        if num_tokens > 0 and last > first:
            speeds[key] = num_tokens / (last - first)
    return speeds


Prompts = Sequence[EncodedPrompt]


def all_prompts(setting: Setting, prompts: Prompts, repeats: int) -> list[list[Turn]]:
    """Make batches of all prompts; the last one is filled with the first prompts."""
    size = setting.batch_size
    if size > len(prompts):
        raise ConfigError(
            f"expected at least {size} prompts for a batch of {size}, got {len(prompts)}; give "
            "more, or smaller --batch-sizes"
        )
    blocks = range(math.ceil(len(prompts) / size))
    return [_batch(setting, prompts, one, repeat) for repeat in range(repeats) for one in blocks]


def next_prompts(setting: Setting, prompts: Prompts, rounds: int) -> list[list[Turn]]:
    """Make a batch of the next prompts for every round, from the first again after the last."""
    return [_batch(setting, prompts, block, 0) for block in range(rounds)]


def _batch(setting: Setting, prompts: Prompts, block: int, repeat: int) -> list[Turn]:
    first = block * setting.batch_size
    numbers = range(first, first + setting.batch_size)
    return [Turn(str(setting), block, prompts[i % len(prompts)], repeat) for i in numbers]


def decode_batch(
    name: str,
    engine: Engine,
    settings: CommonSettings,
    options: Mapping[str, Any],
    batch: Sequence[Turn],
) -> TimedTexts:
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


def _decode_by_stock(settings: CommonSettings, batch: Sequence[Turn]) -> TimedTexts:
    """Decode by mlx-lm's batches, and each token to text as this package does.

    On several machines one text follows the other: every rank would have to run mlx-lm's batches.
    """
    prompts = [turn.prompt.ids for turn in batch]
    if target_of(settings.model).devices:
        return one_by_one(STOCK, stock_arm(settings), batch)
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


def _ask(settings: CommonSettings, server: OpenAiServer, batch: Sequence[Turn]) -> TimedTexts:
    texts = server.write(
        [turn.prompt.text for turn in batch],
        settings.tokenizer.has_chat_template,
        settings.max_tokens,
        settings.temp,
        settings.seed,
    )
    found = []
    for turn, one in zip(batch, texts, strict=True):
        run = turn.run(
            f"{server.name} (server)",
            prompt_seconds=one.first,
            decode_seconds=one.last - one.first,
            tokens=settings.tokenizer.encode(one.text, add_special_tokens=False),
            # A server does not report how many drafts each of its steps accepted.
            accepted_counts=[] if one.steps is None else [one.steps],
        )
        found.append((run, one.text))
    return found


def _finish(settings: CommonSettings, found: Mapping[str, TimedTexts]) -> list[TimedRun]:
    """Return the runs; a server's text that equals the plain one has the plain one's tokens."""
    runs = []
    for texts in found.values():
        for (run, text), (plain, plain_text) in zip(texts, found[PLAIN], strict=True):
            is_served = run.arm.endswith(" (server)")
            if is_served and _is_equal(settings, text, plain, plain_text):
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
