"""A tokenizer, a drafter and a reporter that several tests use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
        """Join the words."""
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
