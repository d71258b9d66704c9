"""Prompts that the target writes itself, for users without texts.

A chat model writes the user's messages: it continues its template from the place where their text
begins (Magpie, arXiv 2406.08464). Any other model writes beginnings of texts, after the token that
begins a text or, without one, after random tokens.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.engine.prompt_encoding import encode_user_turn
from mlx_redrafter.errors import DataError
from mlx_redrafter.target.target import Target
from mlx_redrafter.training.corpus import Sources, limit_held_out
from mlx_redrafter.training.data import Chat, Document, Item
from mlx_redrafter.training.files import load_arrays, save_arrays
from mlx_redrafter.training.initial import find_special_tokens
from mlx_redrafter.training.self_generated import (
    NUM_BEGINNINGS,
    SHORTEST_BEGINNING,
    GenerationJob,
    TextGenerator,
)
from mlx_redrafter.training.teacher_cache import pack_sequences, unpack_sequences
from mlx_redrafter.training.training_request import Reporter
from mlx_redrafter.training_options import DataOptions

ORIGIN = "the model's own text"
# Default number of tokens to train on if the model writes all texts.
SELF_WRITTEN_TOKENS = 1_000_000
# Maximum number of tokens of a question; longer ones are dropped.
QUESTION_TOKENS = 128
# Expected number of tokens of a question with those of dropped ones; SmolLM2 writes 66.
MEAN_TOKENS = 64
# Sampling temperature of questions and beginnings.
QUESTION_TEMP = 1.0
# Maximum number of written questions per kept one.
MAX_TRIES = 8


class PromptWriter:
    """Writer of prompts by a target.

    ``prefix`` has the tokens before a user's message or a text, () if random tokens take their
    place, and ``stop_tokens`` those that end a message; none end a beginning. Creating one raises
    `ConfigError` if the chat template lacks the user's message.
    """

    def __init__(self, target: Target, tokenizer: TokenizerWrapper):
        self.target, self.tokenizer = target, tokenizer
        self.prefix: Sequence[int] = ()
        self.stop_tokens: Sequence[int] = ()
        if tokenizer.has_chat_template:
            self.prefix, after = encode_user_turn(tokenizer)
            special = find_special_tokens(tokenizer, target.vocab_size)
            self.stop_tokens = sorted({*special, *after[:1]})
        elif (bos := getattr(tokenizer, "bos_token_id", None)) is not None:
            self.prefix = (bos,)

    def write(self, options: DataOptions, folder: Path, reporter: Reporter) -> Sources:
        """Write the prompts of a run, none of them empty or twice; those in ``folder`` are read.

        Raise `DataError` if the model writes too few.
        """
        wanted = count_prompts(options)
        longest = QUESTION_TOKENS if self.stop_tokens else SHORTEST_BEGINNING + NUM_BEGINNINGS
        generator = TextGenerator(self.target, self.stop_tokens, options.seed + 2)
        rng, vocab_size = np.random.default_rng(options.seed), self.target.vocab_size
        # The text of a template may be longer than a sequence, and the context is longer still.
        room = min(len(self.prefix) + longest, self.target.context_length or sys.maxsize)
        length = max(options.sequence_length, room)
        writing = replace(options, answer_tokens=longest, sequence_length=length)
        found: dict[str, Item] = {}
        num_written = number = 0

        def report(_: int) -> None:
            reporter.progress("writing prompts", len(found), wanted)

        while len(found) < wanted and num_written < MAX_TRIES * wanted:
            path = folder / f"prompts-{number:05d}.safetensors"
            # As many as are missing, if as many of them are of use as of the earlier ones.
            size = math.ceil((wanted - len(found)) * (num_written + 1) / (len(found) + 1))
            size = min(size, generator.round_size)
            begins = (list(self.prefix) or [int(rng.integers(vocab_size))] for _ in range(size))
            round_jobs = [GenerationJob(begin, QUESTION_TEMP) for begin in begins]
            if not path.exists():
                texts = generator.generate_round(round_jobs, writing, number, report)
                save_arrays(path, pack_sequences(texts))
            number += 1
            num_written += size
            for text in unpack_sequences(load_arrays(path)[0]):
                item = self._read(text.tokens[text.is_trained].tolist())
                if item is not None:
                    found.setdefault(str(item), item)
            report(num_written)
        items = list(found.values())
        if len(items) < 2:
            raise DataError(
                f"expected the model to write prompts, found {len(items)} in {num_written} tries; "
                "give texts with --data or --prompts"
            )
        held_out = min(limit_held_out(options), len(items) // 2)
        return Sources([], items[held_out:], items[:held_out])

    def _read(self, tokens: list[int]) -> Item | None:
        """Read a written prompt; None if it is empty or does not end."""
        if not self.stop_tokens:
            text = self.tokenizer.decode(tokens)
            return Document(text, ORIGIN) if text.strip() else None
        *question, last = tokens
        text = self.tokenizer.decode(question).strip()
        is_whole = bool(text) and last in self.stop_tokens
        return Chat([{"role": "user", "content": text}], ORIGIN) if is_whole else None


def count_prompts(options: DataOptions) -> int:
    """Count the prompts that a run needs, if each is answered about once at full length."""
    assert options.tokens is not None
    return math.ceil(options.tokens / options.answer_tokens) + limit_held_out(options)
