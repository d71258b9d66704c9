"""Whether a drafter belongs to a target: its first draft against the target's own next token.

No drafting is simulated: the target decodes a few prompts greedily, and at each token of the text
the drafter sees what it would see if that token were the root.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.config import Activation
from mlx_redrafter.drafter import Drafter
from mlx_redrafter.generation import encode_prompt
from mlx_redrafter.host import to_ints
from mlx_redrafter.target import Target

# Drafters that fit their target are right about half of the time; chance is one in thousands.
LEAST_ACCEPTANCE = 0.2
TOKENS_PER_PROMPT = 32
PREFILL_STEP_SIZE = 2048
PROMPTS = (
    "Once upon a time, there was a little girl who lived near the sea.",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the first n prime numbers.",
    "What should I see in Rome in three days? Give me a plan for each day.",
)


@dataclass(frozen=True)
class SelfTest:
    """First-token acceptance: the share of positions where the first draft is the target's token.

    Attributes:
        positions: Tokens that were predicted.
        acceptance: With the drafter as it was converted.
        other_activation: With the other recurrence, None where the drafter has no RNN.
    """

    positions: int
    acceptance: float
    other_activation: float | None

    def warning(self, activation: Activation) -> str | None:
        """What is likely to be wrong, None when the drafter seems to fit."""
        share = f"only {self.acceptance:.0%} of the first drafts match the target"
        if self.other_activation is not None and self.other_activation > LEAST_ACCEPTANCE:
            if self.other_activation > 1.5 * self.acceptance:
                return (
                    f"{share}, but {self.other_activation:.0%} do with the other recurrence; "
                    f"convert again with --rnn-activation {other_activation(activation)}"
                )
        if self.acceptance < LEAST_ACCEPTANCE:
            return (
                f"{share}; it was probably trained for another model, on hidden states before the "
                "final norm, or hardly at all. The text stays exact, but is not made faster"
            )
        return None


def other_activation(activation: Activation) -> Activation:
    """The recurrence that this one may have been mistaken for."""
    return "identity" if activation == "silu" else "silu"


def self_test(drafter: Drafter, model: nn.Module, tokenizer: TokenizerWrapper) -> SelfTest:
    """Measure first-token acceptance on `PROMPTS`; waits for the device at every token."""
    target = Target(model)
    texts = [_decode(target, _encode(tokenizer, prompt)) for prompt in PROMPTS]
    other = None
    if drafter.config.rnn:
        other = copy.copy(drafter)
        activation = other_activation(drafter.config.rnn_activation)
        other.config = replace(drafter.config, rnn_activation=activation)
    return SelfTest(
        positions=sum(len(text.tokens) - 1 for text in texts),
        acceptance=_acceptance(drafter, target, texts),
        other_activation=None if other is None else _acceptance(other, target, texts),
    )


@dataclass(frozen=True)
class _Text:
    """A greedy continuation of n tokens; ``hiddens[i]``, shape (1, H), predicted ``tokens[i]``."""

    tokens: list[int]
    hiddens: list[mx.array]


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids, in the chat format where the model has one: that is what drafters are made for."""
    if tokenizer.has_chat_template:
        messages = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return encode_prompt(tokenizer, prompt)


def _decode(target: Target, prompt: list[int]) -> _Text:
    cache = target.new_cache()
    ids = mx.array(prompt, dtype=mx.int32)
    forward = target.prefill(ids, cache, PREFILL_STEP_SIZE, lambda done, total: None)
    tokens: list[int] = []
    hiddens: list[mx.array] = []
    while True:
        token = mx.argmax(forward.logits, axis=-1).astype(mx.int32)
        hiddens.append(forward.hiddens)
        tokens += to_ints(token)
        if len(tokens) > TOKENS_PER_PROMPT:
            return _Text(tokens, hiddens)
        forward = target.advance(token, cache)


def _acceptance(drafter: Drafter, target: Target, texts: Sequence[_Text]) -> float:
    matches: list[int] = []
    for text in texts:
        roots = mx.array(text.tokens[:-1], dtype=mx.int32)
        hiddens = mx.concatenate(text.hiddens[:-1]).astype(drafter.dtype)
        state = drafter.start(target.embed(roots).astype(drafter.dtype))
        drafts = drafter.to_token_ids(mx.argmax(drafter.logits(hiddens, state), axis=-1))
        matches += to_ints(drafts == mx.array(text.tokens[1:]))
    return sum(matches) / len(matches)
