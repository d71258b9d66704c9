"""Timed runs of one way of decoding on one prompt, and rounds of several ways in turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.generation import stream_generate
from mlx_redrafter.engine.responses import GenerationResponse

STOCK = "mlx-lm"
PLAIN = "plain"
STOCK_DRAFT = "mlx-lm draft model"
AUTO = "auto"
UNCOUPLED = "auto, uncoupled"
# Most tokens of a prompt for warming up.
WARM_UP_PROMPT = 512


@dataclass(frozen=True)
class Run:
    """One text, decoded in one way.

    Attributes:
        group: Name of settings whose speeds are not compared with others', such as the dtype.
        block: Number of the block of runs that were made in turns.
        arm: Name of the way of decoding.
        prompt: Name of the prompt.
        category: Category of the prompt.
        repeat: Number of the round, from 0.
        prompt_tokens: Length of the prompt.
        prompt_seconds: Time until the first token.
        decode_seconds: Time from the first token to the last.
        tokens: Token ids of the text, stop token included.
        accepted_counts: Number of steps that accepted a drafts, at index a; empty for stock mlx-lm.
        num_verified: Number of nodes verified in all steps.
        num_unmerged: Number of nodes without merging of prefixes.
        num_plain: Number of steps that verified one token only: plain decoding.
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
    num_plain: int = 0  # older files lack it

    @property
    def steps(self) -> int:
        """Number of verifies whose outcome was used."""
        return sum(self.accepted_counts)

    @property
    def seconds_per_token(self) -> float:
        """Time of decoding per token; the first token belongs to the prompt."""
        return self.decode_seconds / (len(self.tokens) - 1)

    @property
    def turn(self) -> tuple[str, int, str, int]:
        """Key that runs compared with each other share."""
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
    """Settings that all ways of decoding share.

    Attributes:
        model: The target.
        tokenizer: Tokenizer of the target.
        drafter: Whatever drafts for the target.
        max_tokens: Most tokens of a text.
        temp: Temperature.
        seed: Key of the noise.
        couple: Whether drafts are ranked with the noise of the target.
    """

    model: nn.Module
    tokenizer: Any
    drafter: Proposer
    max_tokens: int
    temp: float = 0.0
    seed: int = 0
    couple: bool = True


# A way of decoding: from the ids of a prompt to a stream of responses.
Arm = Callable[[list[int]], Iterator[Any]]


def stock_arm(
    setting: Setting, draft_model: nn.Module | None = None, num_draft_tokens: int = 3
) -> Arm:
    """Decoding by ``mlx_lm.stream_generate``, with its own draft model if there is one."""

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


def drafted_arm(setting: Setting, plan: DraftPlan | None) -> Arm:
    """Decoding by this package with trees of this plan; None for adaptive drafting."""
    sizes = {} if plan is None else plan.options
    return _own_arm(setting, drafter=setting.drafter, couple=setting.couple, **sizes)


def plain_arm(setting: Setting) -> Arm:
    """Decoding by this package without a drafter."""
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
        repeat: Number of the round, from 0.
    """

    group: str
    block: int
    prompt: EncodedPrompt
    repeat: int

    @property
    def key(self) -> tuple[str, int, str, int]:
        """Key of the round's runs, their `Run.turn`."""
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


def take_turn(arms: Mapping[str, Arm], turn: Turn, cool_down: float = 0.0) -> list[Run]:
    """Run every way of decoding once, on one prompt; each repeat starts with another way.

    Args:
        arms: Ways of decoding by name.
        turn: The round.
        cool_down: Seconds to rest before every run.
    """
    names = list(arms)
    shift = (turn.repeat + turn.block) % len(names)
    runs = []
    for name in names[shift:] + names[:shift]:
        time.sleep(cool_down)
        runs.append(run(name, arms[name], turn))
    return runs


def warm_up(arms: Mapping[str, Arm], prompt: EncodedPrompt, num_tokens: int = 8) -> None:
    """Let every way of decoding compile and allocate; nothing is recorded."""
    for arm in arms.values():
        with closing(arm(prompt.ids[:WARM_UP_PROMPT])) as responses:  # type: ignore[type-var]
            for _ in islice(responses, num_tokens):
                pass


def repetition(tokens: Sequence[int], size: int = 4) -> float:
    """Share of the n-grams of a text that occurred in it before.

    A text that repeats itself is easier to predict than others.
    """
    grams = Counter(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))
    total = sum(grams.values())
    return (total - len(grams)) / total if total else 0.0
