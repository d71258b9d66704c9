"""Prompt files: MT-bench and Spec-Bench questions, plain JSON lines, and text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.engine.prompt_encoding import encode_question
from mlx_redrafter.errors import ConfigError, explain

# Spec-Bench counts MT-bench's eight categories as one of its six.
SPEC_BENCH_CATEGORIES = frozenset({"translation", "summarization", "qa", "math_reasoning", "rag"})
MULTI_TURN = "multi_turn"
NO_CATEGORY = "all"


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        name: Name, distinct in its file.
        category: Kind of task, "all" if the file has none.
        text: Text of the prompt, without a chat template.
    """

    name: str
    category: str
    text: str


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts in a file.

    ``.jsonl``: one object per line with "turns" (MT-bench, Spec-Bench; the first turn counts, as
    the later ones need answers), or with "prompt" or "text"; "category" and "question_id" or "id"
    are optional. Anything else: text, prompts separated by empty lines.

    Raises:
        ConfigError: The file is unreadable, has no prompts, or a line is of no known kind.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the prompts in {path}: {explain(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompts in {path} must be UTF-8 text: {error}") from error
    if path.suffix == ".jsonl":
        prompts = [
            _read_line(line, f"{path}, line {number}", number)
            for number, line in enumerate(text.splitlines(), start=1)
            if line.strip()
        ]
        prompts = _as_spec_bench(prompts)
    else:
        blocks = [block.strip() for block in text.split("\n\n")]
        texts = [block for block in blocks if block]
        prompts = [Prompt(str(i), NO_CATEGORY, block) for i, block in enumerate(texts, start=1)]
    if not prompts:
        raise ConfigError(f"no prompts in {path}")
    return prompts


def take_in_turn(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """The first ``count`` prompts, taken from all categories in turn; None keeps all."""
    if count is None or count >= len(prompts):
        return list(prompts)
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    longest = max(len(group) for group in by_category.values())
    in_turn = [group[i] for i in range(longest) for group in by_category.values() if i < len(group)]
    return in_turn[:count]


def encode(
    tokenizer: TokenizerWrapper, prompt: Prompt, use_template: bool, max_tokens: int | None
) -> list[int]:
    """Token ids of a prompt, cut to its first ``max_tokens``.

    Args:
        tokenizer: Tokenizer of the target.
        prompt: The prompt.
        use_template: Whether the chat template, if there is one, is applied.
        max_tokens: Most token ids, None for no limit.
    """
    return encode_question(tokenizer, prompt.text, use_template)[:max_tokens]


def _read_line(line: str, place: str, number: int) -> Prompt:
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not valid JSON: {error}") from error
    if isinstance(values, str):
        values = {"text": values}
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: expected an object or a string, got {type(values).__name__}")
    turns = values.get("turns")
    text = (
        turns[0] if isinstance(turns, list) and turns else values.get("prompt", values.get("text"))
    )
    if not isinstance(text, str) or not text:
        raise ConfigError(f'{place}: expected a text in "turns", "prompt" or "text"')
    name = values.get("question_id", values.get("id", number))
    return Prompt(str(name), str(values.get("category", NO_CATEGORY)), text)


def _as_spec_bench(prompts: list[Prompt]) -> list[Prompt]:
    """Spec-Bench's six categories, if the file is Spec-Bench."""
    if not any(prompt.category in SPEC_BENCH_CATEGORIES for prompt in prompts):
        return prompts
    known = {*SPEC_BENCH_CATEGORIES, NO_CATEGORY}
    return [
        prompt if prompt.category in known else Prompt(prompt.name, MULTI_TURN, prompt.text)
        for prompt in prompts
    ]
