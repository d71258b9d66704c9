"""Whether a drafter belongs to a target: its first draft against the target's own next token.

No drafting is simulated: the target decodes a few prompts greedily, and at each token of the text
the drafter sees what it would see if that token were the root.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_redrafter.config import Activation
from mlx_redrafter.generation import encode_prompt
from mlx_redrafter.host import to_ints
from mlx_redrafter.proposers.redrafter.calibration import (
    TOP_TOKENS,
    Calibration,
    Prediction,
    Text,
    calibrate,
    predict,
)
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target
from mlx_redrafter.topk import top_k

# Drafters that fit their target are right about half of the time; chance is one in thousands.
LEAST_ACCEPTANCE = 0.2
TOKENS_PER_PROMPT = 64
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
        calibration: That fits these texts.
        other_activation: With the other recurrence, None where the drafter has no RNN.
        other_is_better: Whether the other recurrence gives clearly more right drafts, by two
            standard errors of the difference.
    """

    positions: int
    acceptance: float
    calibration: Calibration
    other_activation: float | None = None
    other_is_better: bool = False

    def warning(self, activation: Activation) -> str | None:
        """What is likely to be wrong, None when the drafter seems to fit."""
        share = f"only {self.acceptance:.0%} of the first drafts match the target"
        if self.other_is_better:
            return (
                f"{share}, but {self.other_activation:.0%} do with the other recurrence; convert "
                f"again with --rnn-activation {other_activation(activation)}"
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
    """Measure first-token acceptance on `PROMPTS`, and calibrate.

    Waits for the device at every token.
    """
    target = Target(model)
    texts = [_decode(target, _encode(tokenizer, prompt)) for prompt in PROMPTS]
    firsts, seconds = _matches(drafter, target, texts)
    calibration = calibrate(drafter, target.embed, texts)
    if not drafter.config.rnn:
        return SelfTest(len(firsts), _mean(firsts), calibration)
    other = copy.copy(drafter)
    activation = other_activation(drafter.config.rnn_activation)
    other.config = replace(drafter.config, rnn_activation=activation)
    other_firsts, other_seconds = _matches(other, target, texts)
    before, after = firsts + seconds, other_firsts + other_seconds
    differences = [new - old for old, new in zip(before, after, strict=True)]
    return SelfTest(
        positions=len(firsts),
        acceptance=_mean(firsts),
        calibration=calibration,
        other_activation=_mean(other_firsts),
        other_is_better=sum(differences) > 2 * math.sqrt(sum(map(abs, differences))),
    )


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids, in the chat format where the model has one: that is what drafters are made for."""
    if tokenizer.has_chat_template:
        messages = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return encode_prompt(tokenizer, prompt)


def _decode(target: Target, prompt: list[int]) -> Text:
    """A greedy continuation."""
    cache = target.new_cache()
    ids = mx.array(prompt, dtype=mx.int32)
    forward = target.prefill(ids, cache, PREFILL_STEP_SIZE, lambda done, total: None)
    tokens: list[int] = []
    columns: list[tuple[mx.array, ...]] = []
    while True:
        logits = forward.logits.astype(mx.float32)
        best = top_k(logits, min(TOP_TOKENS, target.vocab_size))
        log_probs = best.values - mx.logsumexp(logits)
        token = best.indices[:, 0].astype(mx.int32)
        columns.append((token, forward.hiddens, best.indices.astype(mx.int32), log_probs))
        tokens += to_ints(token)
        if len(tokens) > TOKENS_PER_PROMPT:
            return Text(*(mx.concatenate(list(rows)) for rows in zip(*columns, strict=True)))
        forward = target.advance(token, cache)


def _matches(
    drafter: Drafter, target: Target, texts: Sequence[Text]
) -> tuple[list[int], list[int]]:
    """1 where a draft is the target's token, else 0: for first drafts, and for second drafts.

    Second drafts follow the right first token. The recurrence shows more in them.
    """
    pairs = [predict(drafter, target.embed, text) for text in texts]
    firsts, seconds = (
        [match for prediction in column for match in _compare(drafter, prediction)]
        for column in zip(*pairs, strict=True)
    )
    return firsts, seconds


def _compare(drafter: Drafter, prediction: Prediction) -> list[int]:
    rows = mx.argmax(prediction.logits, axis=-1)
    return to_ints(drafter.to_token_ids(rows) == prediction.chosen)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
