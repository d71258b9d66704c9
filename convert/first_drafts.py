"""The test of networks that draft from states of the target: EAGLE heads, MTP modules.

The target decodes a few prompts greedily; at each token the network's first draft is compared with
the target's next token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.checkpoints.loading import load
from mlx_redrafter.convert.selftest import (
    LEAST_ACCEPTANCE,
    PREFILL_STEP_SIZE,
    PROMPTS,
    TOKENS_PER_PROMPT,
)
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.engine.prompt_encoding import encode_question
from mlx_redrafter.proposers.autoregressive import AutoregressiveNetwork
from mlx_redrafter.target.target import Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FirstDrafts:
    """Results of the test.

    Attributes:
        positions: Number of predicted tokens.
        acceptance: Share of them whose first draft is the target's token, 0 to 1.
    """

    positions: int
    acceptance: float

    def warning(self) -> str | None:
        """The likely mistake, or None if the network seems to fit."""
        if self.acceptance >= LEAST_ACCEPTANCE:
            return None
        return (
            f"only {self.acceptance:.0%} of the first drafts match the target; the drafter was "
            "probably trained for another model. Decoding stays exact, but is not faster"
        )


class DecodedText(NamedTuple):
    """A text of the target.

    Attributes:
        tokens: Token ids.
        states: The target's states after all but the last of them, shape (n - 1, S).
        num_prompt: Number of tokens of the prompt.
    """

    tokens: list[int]
    states: mx.array
    num_prompt: int


def decode_texts(
    network: AutoregressiveNetwork, name: str | Path
) -> tuple[Target, list[DecodedText]]:
    """A target, and what it writes.

    Raises:
        CheckpointError: It cannot be loaded, or the network does not fit it.
    """
    model, tokenizer, _ = load(name)
    target = Target(model)
    network.check_fit(target, tokenizer)
    logger.info("decoding %d texts, to see which drafts the target accepts", len(PROMPTS))
    layers = network.captured_layers(target)
    return target, [_decode(target, encode_question(tokenizer, one), layers) for one in PROMPTS]


def compare(
    network: AutoregressiveNetwork, target: Target, texts: Iterable[DecodedText]
) -> list[int]:
    """First drafts after each decoded token, 1 where equal to the target's next one, else 0."""
    return [match for text in texts for match in _compare(network, target, text)]


def _decode(target: Target, prompt: list[int], layers: Sequence[int]) -> DecodedText:
    """Continue a prompt greedily."""
    tokens, cache = list(prompt), target.new_cache()
    states: list[mx.array] = []
    ids = mx.array(prompt, dtype=mx.int32)
    outputs = target.prefill(
        ids, cache, PREFILL_STEP_SIZE, lambda done, total: None, layers, states.append
    )
    while True:
        assert outputs.states is not None
        states.append(outputs.states)
        token = mx.argmax(outputs.logits, axis=-1).astype(mx.int32)
        tokens += to_ints(token)
        if len(tokens) > len(prompt) + TOKENS_PER_PROMPT:
            return DecodedText(tokens, mx.concatenate(states), len(prompt))
        outputs = target.advance(token, cache, layers)


def _compare(network: AutoregressiveNetwork, target: Target, text: DecodedText) -> list[int]:
    tokens, states, num_prompt = text
    pairs = network.fuse(states[:-1]), target.embed(mx.array(tokens[1:-1]))
    outputs = network(*pairs, network.make_cache())[num_prompt - 1 :]
    rows = mx.argmax(network.logits(outputs, target), axis=-1)
    ids = rows if network.row_ids is None else network.row_ids[rows]
    return to_ints(ids == mx.array(tokens[num_prompt + 1 :]))
