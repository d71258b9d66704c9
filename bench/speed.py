"""Speed on published prompts: drafted and plain decoding in this process, and servers beside them.

A setting is a temperature, a length of the prompts and a batch size. In every setting the methods
decode the same batches in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.bench.compare import time_shapes
from mlx_redrafter.bench.openai_server import OpenAiServer
from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.report import summarise
from mlx_redrafter.bench.runs import (
    AUTO,
    PLAIN,
    WARM_UP_PROMPT,
    Arm,
    CommonSettings,
    EncodedPrompt,
    TimedRun,
    Turn,
    drafted_arm,
    plain_arm,
    run_together,
)
from mlx_redrafter.bench.timing import MedianEstimate, OnProgress, estimate, rotated
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.errors import ConfigError

# Tokens of the texts that warm a method up.
WARM_UP_TOKENS = 8

# A method that times the texts of one batch, and returns each with its text.
BatchMethod = Callable[[Sequence[Turn]], list[tuple[TimedRun, str]]]


@dataclass(frozen=True)
class Setting:
    """Conditions that all methods share.

    Attributes:
        temp: Temperature.
        context: Length of the prompts in tokens; None for their own.
        batch_size: Texts at the same time.
    """

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
        setting: The setting, as text.
        method: Name of the method.
        category: Category of the prompts; empty for all.
        tokens_per_second: Tokens of a whole batch per second, from its first token to its last.
        speedup: The same, relative to plain decoding of the same batch in this process.
        tokens_per_step: Tokens per forward pass and text; None for a server that reports none.
        acceptance_rate_by_position: Share of steps that accepted at least d drafts, at index d - 1.
        num_texts: Number of texts.
        num_different: Number of texts that differ from plain decoding's.
    """

    setting: str
    method: str
    category: str
    tokens_per_second: MedianEstimate | None
    speedup: MedianEstimate | None
    tokens_per_step: float | None
    acceptance_rate_by_position: list[float]
    num_texts: int
    num_different: int


def measure_speed(
    settings: CommonSettings,
    prompts: Mapping[int | None, Sequence[EncodedPrompt]],
    temps: Sequence[float],
    batch_sizes: Sequence[int],
    servers: Sequence[OpenAiServer],
    repeats: int,
    recording: Recording,
    cool_down: float = 0.0,
    on_progress: OnProgress = lambda done, total: None,
) -> list[SpeedRow]:
    """Decode all prompts in all settings with all methods, in interleaved runs.

    Args:
        settings: Settings that all methods share, except the temperature.
        prompts: The prompts by their length, None for prompts as published.
        temps: Temperatures.
        batch_sizes: Texts at the same time.
        servers: Servers to measure beside this process.
        repeats: Rounds per batch.
        recording: Record of the runs; batches that it already has are not repeated.
        cool_down: Seconds to rest before every batch.
        on_progress: Callback for the number of batches done and their total.

    Raises:
        ConfigError: A batch is larger than the number of prompts.
    """
    work = [
        (Setting(temp, context, size), batch)
        for context, some in prompts.items()
        for size in batch_sizes
        for temp in temps
        for batch in _make_batches(Setting(temp, context, size), some, repeats)
    ]
    missing = [(setting, batch) for setting, batch in work if not recording.has(batch[0].key)]
    if missing:
        longest = max(len(one.ids) for some in prompts.values() for one in some)
        time_shapes(settings, longest, recording)
    methods: dict[str, BatchMethod] = {}
    current: Setting | None = None
    for done, (setting, batch) in enumerate(missing, start=len(work) - len(missing)):
        on_progress(done, len(work))
        mine = replace(settings, temp=setting.temp)
        if setting != current:
            current, methods = setting, _make_methods(mine, setting.batch_size, servers)
            _warm_up(replace(mine, max_tokens=WARM_UP_TOKENS), batch, servers)
        recording.add(_take_turn(methods, batch, mine, cool_down))
    on_progress(len(work), len(work))
    rows = summarise_speed(recording.runs)
    recording.finish(has_servers=bool(servers), rows=rows)
    return rows


def summarise_speed(runs: Sequence[TimedRun]) -> list[SpeedRow]:
    """Make a row per setting and method, and one per category if there are several."""
    rows = []
    categories = list(dict.fromkeys(run.category for run in runs))
    for setting in dict.fromkeys(run.group for run in runs):
        group = [run for run in runs if run.group == setting]
        rows += _rows(setting, "", group)
        is_single = len({run.turn for run in group}) == len({_batch_of(run) for run in group})
        if len(categories) > 1 and is_single:
            for category in categories:
                rows += _rows(setting, category, [one for one in group if one.category == category])
    return rows


def _rows(setting: str, category: str, runs: Sequence[TimedRun]) -> list[SpeedRow]:
    plain = _batches(runs, PLAIN)
    rows = []
    for row in summarise(runs, PLAIN):
        mine = _batches(runs, row.arm)
        ratios = [mine[key] / plain[key] for key in mine if key in plain]
        rows.append(
            SpeedRow(
                setting,
                row.arm,
                category,
                estimate(list(mine.values())) if mine else None,
                estimate(ratios) if ratios else None,
                row.tokens_per_step,
                row.acceptance_rate_by_depth,
                row.num_texts,
                row.num_different or 0,
            )
        )
    return rows


def _batch_of(run: TimedRun) -> tuple[int, int]:
    return run.block, run.repeat


def _batches(runs: Sequence[TimedRun], method: str) -> dict[tuple[int, int], float]:
    """Compute a method's tokens per second, by block and repeat."""
    batches: dict[tuple[int, int], list[TimedRun]] = {}
    for run in runs:
        if run.arm == method:
            batches.setdefault(_batch_of(run), []).append(run)
    speeds = {}
    for key, batch in batches.items():
        first = min(run.prompt_seconds for run in batch)
        last = max(run.prompt_seconds + run.decode_seconds for run in batch)
        num_tokens = sum(len(run.tokens) for run in batch) - 1
        if num_tokens > 0 and last > first:
            speeds[key] = num_tokens / (last - first)
    return speeds


def _make_batches(
    setting: Setting, prompts: Sequence[EncodedPrompt], repeats: int
) -> list[list[Turn]]:
    """Make batches of all prompts; the last one is filled with the first prompts."""
    size = setting.batch_size
    if size > len(prompts):
        raise ConfigError(
            f"expected at least {size} prompts for a batch of {size}, got {len(prompts)}"
        )
    return [
        [
            Turn(str(setting), block, prompts[(start + i) % len(prompts)], repeat)
            for i in range(size)
        ]
        for repeat in range(repeats)
        for block, start in enumerate(range(0, len(prompts), size))
    ]


def _warm_up(
    settings: CommonSettings, batch: Sequence[Turn], servers: Sequence[OpenAiServer]
) -> None:
    """Let every method compile and allocate, with the beginnings of a batch's prompts.

    The whole prompts would be in the servers' caches afterwards.
    """
    short = [
        replace(
            turn,
            prompt=replace(
                turn.prompt,
                ids=turn.prompt.ids[:WARM_UP_PROMPT],
                text=turn.prompt.text[:WARM_UP_PROMPT],
            ),
        )
        for turn in batch
    ]
    for method in _make_methods(settings, len(batch), servers).values():
        method(short)


def _make_methods(
    settings: CommonSettings, batch_size: int, servers: Sequence[OpenAiServer]
) -> dict[str, BatchMethod]:
    if batch_size == 1:
        own: dict[str, BatchMethod] = {
            PLAIN: partial(_decode_one, PLAIN, plain_arm(settings)),
            AUTO: partial(_decode_one, AUTO, drafted_arm(settings, None)),
        }
    else:
        model, tokenizer = settings.model, settings.tokenizer
        engines = {
            PLAIN: Engine(model, tokenizer, None),
            AUTO: Engine(model, tokenizer, settings.drafter),
        }
        own = {name: partial(_decode, name, engine, settings) for name, engine in engines.items()}
    return own | {f"{one.name} (server)": partial(_ask, settings, one) for one in servers}


def _decode_one(name: str, arm: Arm, batch: Sequence[Turn]) -> list[tuple[TimedRun, str]]:
    (turn,) = batch
    return run_together(name, ((0, response) for response in arm(turn.prompt.ids)), batch)


def _decode(
    name: str, engine: Engine, settings: CommonSettings, batch: Sequence[Turn]
) -> list[tuple[TimedRun, str]]:
    stream = engine.stream_batch(
        [turn.prompt.ids for turn in batch],
        batch_size=len(batch),
        max_tokens=settings.max_tokens,
        temp=settings.temp,
        seed=settings.seed,
    )
    return run_together(name, stream, batch)


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
            if run.arm not in (PLAIN, AUTO) and _is_equal(settings, text, plain, plain_text):
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
