"""Prompt files: MT-bench and Spec-Bench questions, plain JSON lines, and text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.bench.runs import EncodedPrompt
from mlx_redrafter.engine.prompt_encoding import encode_question
from mlx_redrafter.errors import ConfigError, explain

# Categories of Spec-Bench, besides the one that holds MT-bench's eight categories.
SPEC_BENCH_CATEGORIES = frozenset({"translation", "summarization", "qa", "math_reasoning", "rag"})
# Spec-Bench's name for MT-bench's categories together.
MULTI_TURN = "multi_turn"
# Category of prompts in files without categories.
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
    """Read the prompts in a file.

    A ``.jsonl`` file has one object per line, with "turns" (MT-bench, Spec-Bench), "prompt" or
    "text"; "category" and "question_id" or "id" are optional. Of several turns the first is the
    prompt, as the later ones need answers. Any other file is text, with empty lines between
    prompts.

    Raises:
        ConfigError: The file cannot be read or has no prompts, or a line has no known layout.
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


def select_prompts(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """Select the first ``count`` prompts, from all categories alternately; None keeps all."""
    if count is None or count >= len(prompts):
        return list(prompts)
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    longest = max(len(group) for group in by_category.values())
    groups = by_category.values()
    alternating = [group[i] for i in range(longest) for group in groups if i < len(group)]
    return alternating[:count]


def encode_prompts(
    tokenizer: TokenizerWrapper,
    prompts: Sequence[Prompt],
    use_template: bool = True,
) -> list[EncodedPrompt]:
    """Encode prompts as token ids.

    Args:
        tokenizer: Tokenizer of the target.
        prompts: The prompts.
        use_template: Whether to apply the chat template, if the tokenizer has one.

    Raises:
        ConfigError: The chat template rejects a prompt.
    """
    return [
        EncodedPrompt(
            prompt.name,
            prompt.category,
            encode_question(tokenizer, prompt.text, use_template),
        )
        for prompt in prompts
    ]


def describe_prompts(path: Path, prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
    """Describe the prompts for a result: file name, and name, category and length of each."""
    return {
        "prompt_file": path.name,
        "prompts": [[prompt.name, prompt.category, len(prompt.ids)] for prompt in prompts],
    }


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
    """Give prompts Spec-Bench's six categories, if the file is Spec-Bench."""
    if not any(prompt.category in SPEC_BENCH_CATEGORIES for prompt in prompts):
        return prompts
    known = {*SPEC_BENCH_CATEGORIES, NO_CATEGORY}
    return [
        prompt if prompt.category in known else Prompt(prompt.name, MULTI_TURN, prompt.text)
        for prompt in prompts
    ]
