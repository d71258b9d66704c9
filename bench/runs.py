"""Timed runs of one decoding method on one prompt, and rounds of several methods."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.decoding.delivery import DecodingStats
from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.engine.generation import stream_generate
from mlx_redrafter.machines.leading import target_of

STOCK = "mlx-lm"
PLAIN = "plain"
STOCK_DRAFT = "mlx-lm draft model"
AUTO = "auto"
# Drafts per step of mlx-lm's own speculative decoding, the default of its command line.
STOCK_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class TimedRun:
    """One text, decoded with one method.

    Attributes:
        group: Name of settings whose speeds are compared only with one another, such as the dtype.
        block: Number of the block of runs that were interleaved.
        prompt_seconds: Time until the first token; ``decode_seconds``, from there to the last.
        tokens: Token ids of the text, stop token included.
        accepted_counts: Number of steps that accepted a drafts, at index a; empty for stock mlx-lm.
        num_verified: Number of nodes verified in all steps.
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
    accepted_counts: list[int] = field(default_factory=list)
    num_verified: int = 0

    @property
    def steps(self) -> int:
        """Number of forward passes of the target whose result was used."""
        return sum(self.accepted_counts)

    @property
    def seconds_per_token(self) -> float:
        """Decoding time per token; the first token counts as part of the prompt."""
        return self.decode_seconds / (len(self.tokens) - 1)

    @property
    def turn(self) -> tuple[str, int, str, int]:
        """Key that is equal for runs to compare with one another."""
        return self.group, self.block, self.prompt, self.repeat

    @property
    def is_timed(self) -> bool:
        """Whether the text is long enough to have a speed; a server may send it in one piece."""
        return len(self.tokens) > 1 and self.decode_seconds > 0


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids, and as the text that a server encodes itself."""

    name: str
    category: str
    ids: list[int]
    text: str = ""


@dataclass(frozen=True)
class CommonSettings:
    model: nn.Module
    tokenizer: Any
    drafter: Proposer | None
    max_tokens: int
    temp: float = 0.0
    seed: int = 0


# A decoding method: a function from the token ids of a prompt to a stream of responses.
Arm = Callable[[list[int]], Iterator[Any]]


def stock_arm(settings: CommonSettings, draft_model: nn.Module | None = None) -> Arm:
    """Decode by ``mlx_lm.stream_generate``, with mlx-lm's own draft model if one is given."""

    def decode(ids: list[int]) -> Iterator[Any]:
        mx.random.seed(settings.seed)
        model, options = target_of(settings.model).stock_model, dict[str, Any]()
        if draft_model is not None:
            options = {"draft_model": draft_model, "num_draft_tokens": STOCK_DRAFT_TOKENS}
        options |= {"max_tokens": settings.max_tokens, "sampler": make_sampler(settings.temp)}
        yield from mlx_lm.stream_generate(model, settings.tokenizer, ids, **options)

    return decode


def drafted_arm(settings: CommonSettings, plan: DraftPlan | None) -> Arm:
    """Decode by this package with trees of this plan, or adaptively if ``plan`` is None."""
    return partial(
        stream_generate,
        settings.model,
        settings.tokenizer,
        max_tokens=settings.max_tokens,
        temp=settings.temp,
        seed=settings.seed,
        drafter=settings.drafter,
        **({} if plan is None else plan.options),
    )


def plain_arm(settings: CommonSettings) -> Arm:
    return drafted_arm(replace(settings, drafter=None), None)


@dataclass(frozen=True)
class Turn:
    """One round: every decoding method, one after the other, on one prompt; see `TimedRun`."""

    group: str
    block: int
    prompt: EncodedPrompt
    repeat: int

    @property
    def key(self) -> tuple[str, int, str, int]:
        """Key of the round's runs, their `TimedRun.turn`."""
        return self.group, self.block, self.prompt.name, self.repeat

    def run(self, arm: str, **measured: Any) -> TimedRun:
        return TimedRun(
            group=self.group,
            block=self.block,
            arm=arm,
            prompt=self.prompt.name,
            category=self.prompt.category,
            repeat=self.repeat,
            prompt_tokens=len(self.prompt.ids),
            **measured,
        )


def run_together(
    name: str, stream: Iterator[tuple[int, Any]], turns: Sequence[Turn]
) -> list[tuple[TimedRun, str]]:
    """Time texts that are decoded together, each from the start of all of them.

    ``stream`` yields numbers of texts with their responses, one per token.
    """
    start = time.perf_counter()
    texts: list[list[tuple[float, int, str]]] = [[] for _ in turns]
    last: dict[int, Any] = {}
    for number, response in stream:
        texts[number].append((time.perf_counter(), response.token, response.text))
        last[number] = response
    mx.clear_cache()
    found = []
    for number, (turn, text) in enumerate(zip(turns, texts, strict=True)):
        times, tokens, pieces = zip(*text, strict=True)
        stats = getattr(last[number], "stats", DecodingStats())  # stock mlx-lm has no counts
        run = turn.run(
            name,
            prompt_seconds=times[0] - start,
            decode_seconds=times[-1] - times[0],
            tokens=list(tokens),
            accepted_counts=list(stats.accepted_counts),
            num_verified=stats.num_verified,
        )
        found.append((run, "".join(pieces)))
    return found


def repetition(tokens: Sequence[int]) -> float:
    """Compute the share of a text's 4-grams that had occurred earlier in the text.

    A text that repeats itself is easier to predict than others.
    """
    grams = Counter(tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3))
    total = sum(grams.values())
    return (total - len(grams)) / total if total else 0.0
