"""A tokenizer, a reporter, and texts that several tests use."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_redrafter import Engine
from mlx_redrafter.target.target import Target
from mlx_redrafter.training import NetworkOptions, Student, TokenSequence, new_student
from mlx_redrafter.training.teacher import read_sequences
from mlx_redrafter.training.teacher_cache import Shard
from tests.helpers.models import tiny_qwen3
from tests.models.tiny_models import build, tiny_config, windowed_config

# Models whose layers keep all tokens, those of a window, or a state.
MODELS = {
    "full": tiny_qwen3,
    **{name: partial(build, windowed_config(name)) for name in ("gemma3_text", "llama4")},
    **{name: partial(build, tiny_config(name)) for name in ("mamba2", "qwen3_5")},
}


class WordTokenizer:
    """One token per word; words are numbered as they come. 0 begins a text, 1 ends a reply."""

    bos_token = "<s>"
    eos_token_ids = frozenset({1})

    def __init__(self, has_chat_template: bool = True, strict_roles: bool = False):
        self.has_chat_template = has_chat_template
        self.strict_roles = strict_roles
        self.words = {"<s>": 0, "</s>": 1}

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        """Ids of the words, after the beginning of a text."""
        ids = [self.words.setdefault(word, len(self.words)) for word in text.split()]
        return [0, *ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        names = {number: word for word, number in self.words.items()}
        return " ".join(names[int(i)] for i in ids)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """``<s> [role] words </s> eol``, like most templates."""
        if self.strict_roles and messages[0]["role"] != "user":
            raise ValueError("the first message must be the user's")
        turns = [f"[{m['role']}] {m['content']} </s> eol" for m in messages]
        return " ".join(["<s>", *turns, *(["[assistant]"] if add_generation_prompt else [])])


class Silent:
    """A reporter that remembers the stages and messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.stages: list[str] = []

    def progress(self, stage: str, done: int, total: int | None) -> None:
        if stage not in self.stages:
            self.stages.append(stage)

    def say(self, message: str) -> None:
        self.lines.append(message)


def sequence(tokens: Iterable[int], given: int = 0) -> TokenSequence:
    """A text of which all tokens but the first ``given`` are drafted."""
    ids = np.array(list(tokens), np.int32)
    return TokenSequence(ids, np.arange(len(ids)) >= given)


def random_texts(
    lengths: Sequence[int], size: int = 64, given: int = 1, seed: int = 0
) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    return [sequence(rng.integers(0, size, n), given) for n in lengths]


def initialised(
    target: Target, options: NetworkOptions, head: mx.array | None = None, seed: int = 3
) -> Student:
    """A new student with its first weights, which begin with the target's head if it is given."""
    student = new_student(target, options)
    student.initialise(head, seed)
    return student


def random_shard(target: Target, student: Student, lengths: Sequence[int], kept: int = 4) -> Shard:
    """Make a student's readings of random texts, of which all tokens but the first are drafted."""
    texts = random_texts(lengths, target.vocab_size)
    return read_sequences(target, texts, kept, student.layers)


def kept_of(log_probs: np.ndarray, k: int) -> dict[str, mx.array]:
    """Keep the ``k`` best log-probabilities of each row, and the rest, as a teacher does."""
    ids = np.argsort(-log_probs, axis=-1, kind="stable")[..., :k]
    kept = np.take_along_axis(log_probs, ids, -1)
    tail = np.maximum(0, 1 - np.exp(kept).sum(-1))
    arrays = {"top_ids": ids.astype(np.int32), "top_log_probs": kept, "tail": tail}
    return {name: mx.array(array) for name, array in arrays.items()}


def drafted_texts(
    model: Any, tokenizer: Any, drafter: Any, calls: Sequence[tuple[list[int], dict[str, Any]]]
) -> tuple[list[TokenSequence], int, int]:
    """Texts after prompts, with options of each; their tokens but the first, and their steps."""
    engine = Engine(model, tokenizer, drafter)
    shared, sequences, tokens, steps = engine.share(), [], 0, 0
    streams = [engine.stream(prompt, shared=shared, **options) for prompt, options in calls]
    turns = zip(*zip_longest(*streams), strict=True)  # which all advance together
    for (prompt, _), turn in zip(calls, turns, strict=True):
        responses = [response for response in turn if response is not None]
        text = [*prompt, *(response.token for response in responses)]
        sequences.append(sequence(text, len(prompt)))
        tokens += len(responses) - 1
        steps += responses[-1].steps
    return sequences, tokens, steps
