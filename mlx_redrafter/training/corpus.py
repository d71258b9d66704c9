"""The sequences of a training run: given ones, those the target writes, and the held-out ones.

Held out are beginnings that the target continues, half greedily, half sampled: what is measured on
them is what drafting will do on the target's own text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mlx_redrafter.errors import ConfigError, DataError
from mlx_redrafter.training.data import (
    CHARS_PER_TOKEN,
    Conversation,
    Document,
    Encoder,
    Item,
    TokenSequence,
    split_text,
)
from mlx_redrafter.training.options import DataOptions
from mlx_redrafter.training.self_generated import AnswerLimits, PromptSource, Writer, plan_jobs

# How often a prompt may be used: often for beginnings of texts, which differ in length each time.
MAX_PASSES = 64
FIXED_PASSES = 16
DEFAULT_PASSES = 2

OnProgress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Corpus:
    """Sequences to train on and sequences to measure on.

    Attributes:
        given: From the files.
        written: By the target.
        held_out: By the target, from prompts that are in neither of the others.
    """

    given: list[TokenSequence]
    written: list[TokenSequence]
    held_out: list[TokenSequence]

    @property
    def train(self) -> list[TokenSequence]:
        """All sequences to train on."""
        return [*self.given, *self.written]


@dataclass(frozen=True)
class Sources:
    """Items divided by what is done with them, each in random order.

    Attributes:
        given: Texts and chats to train on.
        prompts: What the target continues for training.
        held_out: What it continues for measuring.
    """

    given: list[Item]
    prompts: list[Item]
    held_out: list[Item]

    @property
    def fingerprint(self) -> str:
        """Differs when any text differs."""
        digest = hashlib.sha256()
        for items in (self.given, self.prompts, self.held_out):
            for item in items:
                content = item.text if isinstance(item, Document) else item.messages
                digest.update(json.dumps(content, sort_keys=True).encode())
            digest.update(b"|")
        return digest.hexdigest()[:16]


def divide(data: Sequence[Item], prompts: Sequence[Item], options: DataOptions) -> Sources:
    """Hold some items out and say what the rest is for.

    Rows of ``data`` that are prompts join ``prompts``; without any prompts, texts of ``data`` are
    also continued from their beginnings.

    Raises:
        DataError: There are fewer than two items.
    """
    rng = np.random.default_rng(options.seed)
    max_chars = CHARS_PER_TOKEN * options.sequence_length
    given = [i for item in data for i in _pieces(item, max_chars) if not _is_prompt(i)]
    asked = [*prompts, *(item for item in data if _is_prompt(item))]
    given = [given[i] for i in rng.permutation(len(given))]
    asked = [asked[i] for i in rng.permutation(len(asked))]
    pool = asked or given
    if len(pool) < 2:
        raise DataError(
            f"expected at least two texts or prompts, one of them to measure on, found {len(pool)}"
        )
    count = min(options.held_out, max(1, len(pool) // 10))
    if asked:
        return Sources(given, asked[count:], asked[:count])
    return Sources(given[count:], given[count:], given[:count])


def _is_prompt(item: Item) -> bool:
    return isinstance(item, Conversation) and not item.is_answered


def _pieces(item: Item, max_chars: int) -> Iterator[Item]:
    if isinstance(item, Document):
        for piece in split_text(item.text, max_chars):
            yield Document(piece, item.origin)
    else:
        yield item


def build_corpus(
    sources: Sources,
    encoder: Encoder,
    writer: Writer,
    options: DataOptions,
    folder: Path,
    on_progress: OnProgress,
) -> Corpus:
    """Tokenise the given texts and let the target write the others.

    Args:
        sources: Items, divided.
        encoder: Makes tokens of them.
        writer: The target.
        options: How much of each.
        folder: Where written texts are stored; complete ones are not written again.
        on_progress: Called with what is being done, tokens done, and their number if known.

    Raises:
        ConfigError: The target is to write all texts and nobody says how many.
        DataError: A text cannot be encoded.
    """
    share = options.written_share if sources.given else 1.0
    given = list(_encode_given(sources.given, encoder, options, 1.0 - share))
    wanted = _num_to_write(given, share, options)
    written: list[TokenSequence] = []
    if wanted is None or wanted > 0:
        written = writer.write(
            plan_jobs(
                prompts := [_as_source(i, encoder, options) for i in sources.prompts],
                options.temp,
                _num_passes(prompts, wanted),
                options.seed,
            ),
            AnswerLimits(options.answer_tokens, options.sequence_length, wanted),
            folder,
            "written",
            lambda done: on_progress("writing", done, wanted),
        )
    held_out = writer.write(
        plan_jobs(
            [_as_source(i, encoder, options) for i in sources.held_out],
            options.temp,
            1,
            options.seed + 1,
        ),
        AnswerLimits(options.answer_tokens, options.sequence_length),
        folder,
        "held-out-text",
        lambda done: on_progress("writing held-out text", done, None),
    )
    return Corpus(given, written, held_out)


def _encode_given(
    items: Sequence[Item], encoder: Encoder, options: DataOptions, share: float
) -> Iterator[TokenSequence]:
    if share == 0:
        return
    budget = None if options.max_tokens is None else share * options.max_tokens
    total = 0
    for item in items:
        for sequence in encoder.encode(item):
            if budget is not None and total >= budget:
                return
            total += int(sequence.is_trained.sum())
            yield sequence


def _num_to_write(given: Sequence[TokenSequence], share: float, options: DataOptions) -> int | None:
    if options.max_tokens is not None:
        return round(share * options.max_tokens)
    if given:
        total = sum(int(sequence.is_trained.sum()) for sequence in given)
        return round(total * share / (1.0 - share))
    return None


def _num_passes(prompts: Sequence[PromptSource], wanted: int | None) -> int:
    if not prompts:
        raise ConfigError("the target is to write texts, but there is nothing to start them from")
    if wanted is None:
        return DEFAULT_PASSES
    return FIXED_PASSES if any(prompt.is_fixed for prompt in prompts) else MAX_PASSES


def _as_source(item: Item, encoder: Encoder, options: DataOptions) -> PromptSource:
    if isinstance(item, Conversation):
        tokens = encoder.encode_prompt(item)
        if len(tokens) > options.sequence_length - 8:
            tokens = tokens[: options.sequence_length // 2]
        return PromptSource(tokens, is_fixed=True)
    first = next(iter(encoder.encode(item)))
    return PromptSource([int(token) for token in first.tokens], is_fixed=False)


def describe(options: DataOptions) -> dict[str, object]:
    """The options that decide which sequences there are."""
    return asdict(options)
