"""Texts of a model beside stock mlx-lm's, and gaps of the two best logits where they differ."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_redrafter.bench.recording import Recording
from mlx_redrafter.bench.runs import AUTO, STOCK, CommonSettings, EncodedPrompt, TimedRun, Turn
from mlx_redrafter.bench.speed import decode_batch
from mlx_redrafter.bench.timing import OnProgress
from mlx_redrafter.bench.turns import Method, TimedTexts, arm_name, one_by_one
from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.device_read import to_floats
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.engine import Engine
from mlx_redrafter.engine.text_comparison import num_same
from mlx_redrafter.machines.leading import target_of

# Bits of a floating-point number behind its first one.
MANTISSA = {mx.float32: 23, mx.float16: 10, mx.bfloat16: 7}
# Number of turns of a conversation with a kept cache.
NUM_TURNS = 3


@dataclass(frozen=True)
class Conditions:
    """Conditions of texts that must be equal.

    Attributes:
        name: Name in tables.
        batch_size: Texts of a batch, or turns of a conversation.
        options: Options of decoding that mlx-lm has, too.
        is_kept: Whether the texts of a batch are turns of a conversation with a kept cache.
    """

    name: str
    batch_size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    is_kept: bool = False

    def begin(self, settings: CommonSettings) -> dict[str, Any]:
        """Return the options of one batch."""
        cache = {"prompt_cache": make_prompt_cache(target_of(settings.model).stock_model)}
        return {**self.options, **(cache if self.is_kept else {})}


@dataclass(frozen=True)
class Compared:
    """A text beside stock mlx-lm's.

    Attributes:
        num_tokens: Tokens of mlx-lm's text.
        gap: Difference of mlx-lm's two best logits at the first different token; 0 without one,
            as the next two.
        unit: Unit of the last place of the best logit there, in the dtype of the logits.
        noise: Largest change of a logit there if mlx-lm reads prompt and text in one pass.
    """

    conditions: str
    arm: str
    prompt: str
    num_tokens: int
    is_equal: bool
    gap: float
    unit: float
    noise: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding alone can change the order of the two best logits."""
        return self.gap <= 2 * self.noise


def conditions(batch_size: int, model: nn.Module) -> list[Conditions]:
    """Return the conditions under which texts are compared; mlx-lm quantises no windows."""
    found = [
        Conditions("", batch_size),
        Conditions(f"{NUM_TURNS} turns, kept cache", NUM_TURNS, is_kept=True),
    ]
    if all(type(layer) is KVCache for layer in make_prompt_cache(model)):
        quantised = {"kv_bits": 8, "quantized_kv_start": 0}
        found.insert(1, Conditions("8-bit K/V cache", batch_size, quantised))
    return found


def decode_texts(
    settings: CommonSettings,
    drafters: Mapping[str, Proposer],
    plans: Sequence[DraftPlan],
    prompts: Sequence[EncodedPrompt],
    batch_size: int,
    recording: Recording,
    on_progress: OnProgress = lambda done, total: None,
) -> list[Compared]:
    """Decode all prompts by stock mlx-lm and with all drafters, and compare the texts.

    ``plans`` are fixed shapes, beside the default. The drafter of the settings is not used, and
    batches that the recording already has are not repeated.
    """
    work = [
        (one, [Turn(one.name, 0, prompt, 0) for prompt in prompts[first : first + one.batch_size]])
        for one in conditions(batch_size, target_of(settings.model).stock_model)
        for first in range(0, len(prompts), one.batch_size)
    ]
    for done, (one, batch) in enumerate(work):
        on_progress(done, len(work))
        if not recording.has(batch[0].key):
            methods = _methods(settings, one, drafters, plans)
            recording.add(run for decode in methods for run, _ in decode(batch))
    on_progress(len(work), len(work))
    found = [text for one, batch in work for text in _compare(settings, one, batch, recording.runs)]
    recording.finish(found=found)
    return found


def _methods(
    settings: CommonSettings,
    one: Conditions,
    drafters: Mapping[str, Proposer],
    plans: Sequence[DraftPlan],
) -> Iterator[Method]:
    yield partial(_decode_in_turn, STOCK, partial(_stock, settings), settings, one)
    for name, drafter in drafters.items():
        shapes: dict[str, dict[str, Any]] = {AUTO: {}}
        if one.name == "":
            shapes |= {arm_name(plan): plan.options for plan in plans}
        for shape, options in shapes.items():
            engine = Engine(settings.model, settings.tokenizer, drafter)
            stream = partial(engine.stream, max_tokens=settings.max_tokens, **options)
            yield partial(_decode_in_turn, f"{name}, {shape}", stream, settings, one)
            if not one.is_kept:
                arm = f"{name}, {shape}, in a batch"
                yield partial(decode_batch, arm, engine, settings, {**one.options, **options})


def _stock(settings: CommonSettings, ids: list[int], **options: Any) -> Iterator[Any]:
    yield from mlx_lm.stream_generate(
        target_of(settings.model).stock_model,
        settings.tokenizer,
        ids,
        max_tokens=settings.max_tokens,
        **options,
    )


def _decode_in_turn(
    name: str,
    decode: Callable[..., Iterator[Any]],
    settings: CommonSettings,
    one: Conditions,
    batch: Sequence[Turn],
) -> TimedTexts:
    return one_by_one(name, partial(decode, **one.begin(settings)), batch)


def _compare(
    settings: CommonSettings, one: Conditions, batch: Sequence[Turn], runs: Sequence[TimedRun]
) -> Iterator[Compared]:
    """Compare the texts of a batch, up to the first difference of a conversation."""
    found = {(run.arm, run.turn): run.tokens for run in runs}
    for arm in dict.fromkeys(arm for arm, turn in found if turn == batch[0].key and arm != STOCK):
        for number, turn in enumerate(batch):
            expected, text = found[STOCK, turn.key], found[arm, turn.key]
            is_equal = text == expected
            measured = (0.0, 0.0, 0.0)
            if not is_equal:
                same = expected[: min(num_same(expected, text), len(expected) - 1)]
                measured = _gap(settings, one, batch[: number + 1], same)
            name = turn.prompt.name
            yield Compared(one.name, arm, name, len(expected), is_equal, *measured)
            if not is_equal and one.is_kept:
                break


def _gap(
    settings: CommonSettings, one: Conditions, batch: Sequence[Turn], text: Sequence[int]
) -> tuple[float, float, float]:
    """Return gap, unit and noise of stock mlx-lm's logits behind the beginning of a text."""
    prompt = batch[-1].prompt.ids
    by_steps = _logits(settings, one, batch, prompt, len(text))
    at_once = _logits(settings, one, batch, [*prompt, *text], 0)
    second, best = to_floats(mx.sort(by_steps.astype(mx.float32))[-2:])
    unit = 2.0 ** (math.floor(math.log2(abs(best))) - MANTISSA[by_steps.dtype])
    moved = mx.abs(by_steps.astype(mx.float32) - at_once.astype(mx.float32))
    (noise,) = to_floats(mx.max(moved, keepdims=True))
    return best - second, unit, noise


def _logits(
    settings: CommonSettings, one: Conditions, batch: Sequence[Turn], ids: list[int], position: int
) -> mx.array:
    """Return stock mlx-lm's logits at a position of the text of the last turn; shape (V,)."""
    options = one.begin(settings)
    for turn in batch[:-1] if one.is_kept else ():
        for _ in _stock(settings, turn.prompt.ids, **options):
            pass
    found: list[mx.array] = []

    def record(tokens: mx.array, logits: mx.array) -> mx.array:
        found.append(logits.flatten())
        return logits

    texts = _stock(settings, ids, logits_processors=[record], **options)
    for _ in islice(texts, position + 1):
        pass
    return found[position]


COLUMNS = (
    "model", "precision", "conditions", "texts", "tokens", "different", "no tie", "largest gap",
    "in units", "noise there",
)  # fmt: skip


def tabulate(model: str, precision: str, found: Sequence[Compared]) -> list[list[str]]:
    """Make a row per conditions."""
    rows = []
    for name in dict.fromkeys(one.conditions for one in found):
        texts = [one for one in found if one.conditions == name]
        different = [one for one in texts if not one.is_equal]
        row = [model, precision, name or "alone and in batches", str(len(texts))]
        row += [f"{sum(one.num_tokens for one in texts):,}", str(len(different))]
        row.append(str(sum(not one.is_tie for one in different)))
        if different:
            worst = max(different, key=lambda one: one.gap)
            numbers = worst.gap, worst.gap / worst.unit, worst.noise
            row += [f"{number:.2g}" for number in numbers]
        rows.append(row + [""] * (len(COLUMNS) - len(row)))
    return rows
