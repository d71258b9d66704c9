"""The sequences of a training run: given, self-generated and held-out.

The target generates the held-out sequences, too, from prompts that no other sequence starts from.
So they measure drafting as in decoding, which continues text of the target.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_redrafter.errors import DataError
from mlx_redrafter.training.data import (
    CHARS_PER_TOKEN,
    Chat,
    Document,
    Encoder,
    Item,
    TokenSequence,
    split_text,
)
from mlx_redrafter.training.self_generated import PromptSource, TextGenerator, plan_jobs
from mlx_redrafter.training.teacher import OnTokens, Teacher
from mlx_redrafter.training.training_request import Reporter
from mlx_redrafter.training_options import DataOptions

# Maximum number of uses of a text as a prompt; its beginning has a random length each time.
MAX_PASSES = 64
# Maximum number of uses of the prompts if one of them is fixed, which repeats in full.
FIXED_PASSES = 16
# Number of uses of each prompt without a limit of tokens.
DEFAULT_PASSES = 2


@dataclass(frozen=True)
class Corpus:
    """Sequences from files, and those that the target generated for training and measuring."""

    given: list[TokenSequence]
    self_generated: list[TokenSequence]
    held_out: list[TokenSequence]

    @property
    def train(self) -> list[TokenSequence]:
        return [*self.given, *self.self_generated]


@dataclass(frozen=True)
class Sources:
    """Items divided by their use, each list in random order.

    The drafter trains on ``given``; the target continues ``prompts`` for training and ``held_out``
    for measuring.
    """

    given: list[Item]
    prompts: list[Item]
    held_out: list[Item]

    @property
    def text_fingerprint(self) -> str:
        """Hash of all texts and of their division."""
        digest = hashlib.sha256()
        for items in (self.given, self.prompts, self.held_out):
            for item in items:
                content = item.text if isinstance(item, Document) else item.messages
                digest.update(json.dumps(content, sort_keys=True).encode())
            digest.update(b"|")
        return digest.hexdigest()[:16]

    def generated_share(self, options: DataOptions) -> float:
        """Return the share of the trained tokens that the target generates."""
        return options.self_generated if self.given else 1.0


def divide(data: Sequence[Item], prompts: Sequence[Item], options: DataOptions) -> Sources:
    """Hold some items out and divide the others by their use.

    Prompts in ``data`` join ``prompts``. If there are no prompts, the target continues beginnings
    of the texts of ``data``, and the drafter also trains on these texts.
    """
    rng = np.random.default_rng(options.seed)
    max_chars = CHARS_PER_TOKEN * options.sequence_length
    given: list[Item] = []
    asked = [*prompts]
    for item in data:
        if isinstance(item, Document):
            given += [Document(piece, item.origin) for piece in split_text(item.text, max_chars)]
        else:
            (given if item.is_answered else asked).append(item)
    given = [given[i] for i in rng.permutation(len(given))]
    asked = [asked[i] for i in rng.permutation(len(asked))]
    pool = asked or given
    count = min(limit_held_out(options), max(1, len(pool) // 10))
    held_out = pool[:count]
    begun = set(map(_describe_start, held_out))
    given, prompts = ([i for i in one if _describe_start(i) not in begun] for one in (given, pool))
    if not prompts:
        raise DataError(
            "expected at least two texts or prompts that differ, one of them to measure on, found "
            f"{len(begun)}: {held_out[0].origin}; give more with --data or --prompts, or leave a "
            "single prompt out"
        )
    return Sources(given, prompts, held_out)


def limit_held_out(options: DataOptions) -> int:
    """Limit the number of held-out texts, in a small run to a tenth of the tokens."""
    if options.tokens is None:
        return options.held_out
    return min(options.held_out, max(2, options.tokens // (10 * options.answer_tokens)))


def _describe_start(item: Item) -> str:
    """Render what the target continues if an item is a prompt."""
    return json.dumps(item.text if isinstance(item, Document) else item.asked, sort_keys=True)


def build_corpus(
    sources: Sources,
    encoder: Encoder,
    generator: TextGenerator,
    options: DataOptions,
    training: Teacher,
    held_out: Teacher,
    reporter: Reporter,
) -> Corpus:
    """Tokenise the given texts, let the target read them, and let it generate the others.

    Shards of the teachers are read instead of made again.
    """

    def encode(items: Sequence[Item]) -> list[PromptSource]:
        return [as_prompt_source(item, encoder, options) for item in items]

    def report(stage: str, total: int | None) -> OnTokens:
        done = 0

        def on_tokens(count: int) -> None:
            nonlocal done
            done += count
            reporter.progress(stage, done, total)

        return on_tokens

    share = sources.generated_share(options)
    given = encode_given(sources.given, encoder, options, 1.0 - share, reporter)
    shards = training.read(given, report("reading text", sum(map(len, given))))
    given = [text for texts in shards for text in texts]
    wanted = count_generated(sum(one.num_trained for one in given), share, options)
    self_generated: list[TokenSequence] = []
    if wanted is None or wanted > 0:
        prompts = encode(sources.prompts)
        passes = _choose_num_passes(prompts, wanted)
        jobs = plan_jobs(prompts, options.temp, passes, options.seed)
        on_tokens = report("generating training text", wanted)
        self_generated = generator.answer(training, jobs, options, wanted, on_tokens, len(shards))
        found = sum(one.num_trained for one in self_generated)
        if wanted is not None and found < wanted:
            reporter.say(
                f"the model generated {found:,} tokens for training, not {wanted:,}, as prompts "
                f"and texts are few ({len(prompts)}); give more of them"
            )
    jobs = plan_jobs(encode(sources.held_out), options.temp, 1, options.seed + 1)
    on_tokens = report("generating held-out text", None)
    measured = generator.answer(held_out, jobs, options, None, on_tokens)
    return Corpus(given, self_generated, measured)


def encode_given(
    items: Sequence[Item], encoder: Encoder, options: DataOptions, share: float, reporter: Reporter
) -> list[TokenSequence]:
    """Encode given items up to a share of the run's tokens, and report those that leave nothing."""
    given: list[TokenSequence] = []
    budget = math.inf if options.tokens is None else share * options.tokens
    total = num_lost = 0
    for item in items if share > 0 else ():
        found = list(encoder.encode(item))
        num_lost += isinstance(item, Chat) and not found
        for sequence in found:
            if total < budget:
                total += sequence.num_trained
                given.append(sequence)
        if total >= budget:
            break
    if num_lost:
        reporter.say(
            f"{num_lost} chats are left out, as no reply begins in their first "
            f"{options.sequence_length} tokens"
        )
    return given


def count_generated(num_given: int, share: float, options: DataOptions) -> int | None:
    """Count the tokens that the target generates next to given ones; None without a limit."""
    if options.tokens is not None:
        return round(share * options.tokens)
    return round(num_given * share / (1.0 - share)) if num_given and share < 1 else None


def _choose_num_passes(prompts: Sequence[PromptSource], wanted: int | None) -> int:
    if wanted is None:
        return DEFAULT_PASSES
    return FIXED_PASSES if any(prompt.is_fixed for prompt in prompts) else MAX_PASSES


def as_prompt_source(item: Item, encoder: Encoder, options: DataOptions) -> PromptSource:
    """Encode a prompt, or a text whose beginning is one, and leave room for an answer.

    A long prompt keeps its end, which the target answers, and its first token, which it expects.
    """
    half = options.sequence_length // 2
    if isinstance(item, Chat):
        tokens = encoder.encode_prompt(item)
        if len(tokens) > options.sequence_length - 8:
            tokens = [tokens[0], *tokens[1 - half :]]
    else:
        first = next(iter(encoder.encode(item)), None)
        tokens = [] if first is None else first.tokens[:half].tolist()
    if not tokens:
        raise DataError(f"{item.origin}: expected a text, found no token in it; leave it out")
    return PromptSource(tokens, is_fixed=isinstance(item, Chat))
