"""Runs: one way of decoding, one prompt, timed; and rounds of several ways in turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.config import TreeShape
from mlx_redrafter.generation import GenerationResponse, stream_generate
from mlx_redrafter.proposers.redrafter.network import Drafter

STOCK = "mlx-lm"
PLAIN = "plain"
STOCK_DRAFT = "mlx-lm draft model"
AUTO = "auto"
UNCOUPLED = "auto, uncoupled"
# Tokens of a prompt that are enough to warm up with.
WARM_UP_PROMPT = 512


@dataclass(frozen=True)
class Run:
    """One text, decoded in one way.

    Attributes:
        group: What distinguishes settings whose speeds are not compared, such as the dtype.
        block: Runs of one block were made in turns.
        arm: The way of decoding.
        prompt: Name of the prompt.
        category: Of the prompt.
        repeat: Counts from 0.
        prompt_tokens: Length of the prompt.
        prompt_seconds: Until the first token.
        decode_seconds: From the first token to the last.
        tokens: Token ids of the text, stop token included.
        accepted_counts: At index a, the steps that accepted a drafts; empty for stock mlx-lm.
        num_verified: Nodes verified in all steps.
        num_unmerged: The same without merging prefixes.
        num_plain: Steps that verified one token only: plain decoding.
    """

    group: str
    block: int
    arm: str
    prompt: str
    category: str
    repeat: int
    prompt_tokens: int
    prompt_seconds: float
    decode_seconds: float
    tokens: list[int]
    accepted_counts: list[int]
    num_verified: int
    num_unmerged: int
    num_plain: int = 0  # files of before it was counted lack it

    @property
    def steps(self) -> int:
        """Verifies whose outcome was used."""
        return sum(self.accepted_counts)

    @property
    def seconds_per_token(self) -> float:
        """Of decoding: the first token belongs to the prompt."""
        return self.decode_seconds / (len(self.tokens) - 1)

    @property
    def turn(self) -> tuple[str, int, str, int]:
        """What the runs that are compared with each other share."""
        return self.group, self.block, self.prompt, self.repeat

    @property
    def is_timed(self) -> bool:
        """Whether the text is long enough to have a speed."""
        return len(self.tokens) > 1


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids."""

    name: str
    category: str
    ids: list[int]


@dataclass(frozen=True)
class Setting:
    """What all ways of decoding share.

    Attributes:
        model: The target.
        tokenizer: Its tokenizer.
        drafter: Its drafter.
        max_tokens: Most tokens of a text.
        temp: Temperature.
        seed: Of the noise.
        couple: Rank drafts with the noise that the target will choose with.
    """

    model: nn.Module
    tokenizer: Any
    drafter: Drafter
    max_tokens: int
    temp: float = 0.0
    seed: int = 0
    couple: bool = True


# A way of decoding: a prompt's ids to a stream of responses.
Arm = Callable[[list[int]], Iterator[Any]]


def stock_arm(
    setting: Setting, draft_model: nn.Module | None = None, num_draft_tokens: int = 3
) -> Arm:
    """``mlx_lm.stream_generate``, with mlx-lm's own draft model if there is one."""

    def decode(ids: list[int]) -> Iterator[Any]:
        mx.random.seed(setting.seed)
        drafting: dict[str, Any] = {}
        if draft_model is not None:
            drafting = {"draft_model": draft_model, "num_draft_tokens": num_draft_tokens}
        yield from mlx_lm.stream_generate(
            setting.model,
            setting.tokenizer,
            ids,
            max_tokens=setting.max_tokens,
            sampler=make_sampler(temp=setting.temp),
            **drafting,
        )

    return decode


def drafted_arm(setting: Setting, shape: TreeShape | None) -> Arm:
    """This package with trees of this shape; None lets it choose the shape of every step."""
    sizes = {} if shape is None else vars(shape)
    return _own_arm(setting, drafter=setting.drafter, couple=setting.couple, **sizes)


def plain_arm(setting: Setting) -> Arm:
    """This package without a drafter."""
    return _own_arm(setting)


def _own_arm(setting: Setting, **drafting: Any) -> Arm:
    def decode(ids: list[int]) -> Iterator[Any]:
        yield from stream_generate(
            setting.model,
            setting.tokenizer,
            ids,
            max_tokens=setting.max_tokens,
            temp=setting.temp,
            seed=setting.seed,
            **drafting,
        )

    return decode


@dataclass(frozen=True)
class Turn:
    """One round: several ways of decoding, one after the other, on one prompt.

    Attributes:
        group: See `Run`.
        block: See `Run`.
        prompt: The prompt.
        repeat: Counts from 0.
    """

    group: str
    block: int
    prompt: EncodedPrompt
    repeat: int

    @property
    def key(self) -> tuple[str, int, str, int]:
        """`Run.turn` of its runs."""
        return self.group, self.block, self.prompt.name, self.repeat


def run(name: str, arm: Arm, turn: Turn) -> Run:
    """Decode one text and time it."""
    prompt = turn.prompt
    tokens: list[int] = []
    start = first = last = time.perf_counter()
    response: Any = None
    num_plain = num_verified = 0
    for response in arm(prompt.ids):
        last = time.perf_counter()
        if not tokens:
            first = last
        tokens.append(response.token)
        if isinstance(response, GenerationResponse):
            num_plain += response.stats.num_verified == num_verified + 1
            num_verified = response.stats.num_verified
    stats = response.stats if isinstance(response, GenerationResponse) else None
    mx.clear_cache()
    return Run(
        group=turn.group,
        block=turn.block,
        arm=name,
        prompt=prompt.name,
        category=prompt.category,
        repeat=turn.repeat,
        prompt_tokens=len(prompt.ids),
        prompt_seconds=first - start,
        decode_seconds=last - first,
        tokens=tokens,
        accepted_counts=list(stats.accepted_counts) if stats else [],
        num_verified=num_verified,
        num_unmerged=stats.num_unmerged if stats else 0,
        num_plain=num_plain,
    )


def take_turn(arms: dict[str, Arm], turn: Turn, cool_down: float = 0.0) -> list[Run]:
    """Every way of decoding once, on one prompt; each repeat starts with another one.

    Args:
        arms: Ways of decoding by name.
        turn: Which round it is.
        cool_down: Seconds to rest before every run.
    """
    names = list(arms)
    shift = (turn.repeat + turn.block) % len(names)
    runs = []
    for name in names[shift:] + names[:shift]:
        time.sleep(cool_down)
        runs.append(run(name, arms[name], turn))
    return runs


def warm_up(arms: dict[str, Arm], prompt: EncodedPrompt, num_tokens: int = 8) -> None:
    """Let every way of decoding compile and allocate what it needs; nothing is recorded."""
    for arm in arms.values():
        with closing(arm(prompt.ids[:WARM_UP_PROMPT])) as responses:  # type: ignore[type-var]
            for _ in islice(responses, num_tokens):
                pass


def repetition(tokens: Sequence[int], size: int = 4) -> float:
    """Share of the n-grams of a text that occurred before in it.

    Drafts of a text that repeats itself are right more often than they deserve.
    """
    grams = Counter(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))
    total = sum(grams.values())
    return (total - len(grams)) / total if total else 0.0
