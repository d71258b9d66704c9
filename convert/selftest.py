"""The self-test: tells whether a drafter was trained for a target.

The target decodes a few prompts greedily. At each token of the texts the drafter gets the inputs of
a step with this token as the root, and its first draft is compared with the target's next token.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model

from mlx_redrafter.device_read import to_ints
from mlx_redrafter.engine.prompt_encoding import encode_question
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.fit import TOP_TOKENS, Calibration, ObservedSequence, Prediction
from mlx_redrafter.proposers.medusa import fit_heads as heads
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.proposers.redrafter.config import Activation
from mlx_redrafter.proposers.redrafter.fit_drafter import calibrate, predict
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.topk import top_k

logger = logging.getLogger(__name__)

# Acceptance below which the user is warned; fitting drafters reach about 0.5, chance about 0.001.
LEAST_ACCEPTANCE = 0.2
# Number of tokens to predict after each prompt.
TOKENS_PER_PROMPT = 64
PREFILL_STEP_SIZE = 2048
PROMPTS = (
    "Once upon a time, there was a little girl who lived near the sea.",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the first n prime numbers.",
    "What should I see in Rome in three days? Give me a plan for each day.",
)

N = TypeVar("N", bound=DraftNetwork)


@dataclass(frozen=True)
class SelfTest:
    """Results of the self-test.

    Acceptance is the share of positions whose first draft is the target's token.

    Attributes:
        positions: Number of predicted tokens.
        acceptance: Acceptance of the converted drafter, 0 to 1.
        calibration: Calibration of the drafter on the texts of the test.
        other_activation: Acceptance with the other recurrence, 0 to 1, None for drafters without
            an RNN.
        other_is_better: Whether the other recurrence gives clearly more correct drafts, by two
            standard errors of the difference.
    """

    positions: int
    acceptance: float
    calibration: Calibration
    other_activation: float | None = None
    other_is_better: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The results as they stand in a ``config.json``."""
        return {**asdict(self), "calibration": self.calibration.to_dict()}

    def warning(self, activation: Activation = "silu") -> str | None:
        """Describe the likely mistake, or return None if the drafter seems to fit.

        Args:
            activation: Activation of a recurrent drafter.
        """
        share = f"only {self.acceptance:.0%} of the first drafts match the target"
        if self.other_is_better:
            return (
                f"{share}, but {self.other_activation:.0%} do with the other recurrence; convert "
                f"again with --rnn-activation {swap_activation(activation)}"
            )
        if self.acceptance < LEAST_ACCEPTANCE:
            return (
                f"{share}; the drafter was probably trained for another model, on hidden states "
                "before the final norm, or hardly at all. Decoding stays exact, but is not faster"
            )
        return None


def swap_activation(activation: Activation) -> Activation:
    """Return the other activation of the recurrence."""
    return "identity" if activation == "silu" else "silu"


def self_test(drafter: Drafter, model: nn.Module, tokenizer: TokenizerWrapper) -> SelfTest:
    """Measure the acceptance of first drafts on `PROMPTS`, and calibrate the drafter.

    Waits for the device at every token. A quantised drafter is dequantised once: on a CPU that is
    many times faster than to do it for every prediction.
    """
    drafter = _dequantised(drafter)
    target = Target(model)
    texts = _decode_all(target, tokenizer)
    firsts, seconds = _find_matches(drafter, target, texts)
    calibration = calibrate(drafter, target.embed, texts)
    if not drafter.config.rnn:
        return SelfTest(len(firsts), _mean(firsts), calibration)
    other = copy.copy(drafter)
    activation = swap_activation(drafter.config.rnn_activation)
    other.config = replace(drafter.config, rnn_activation=activation)
    other_firsts, other_seconds = _find_matches(other, target, texts)
    before, after = firsts + seconds, other_firsts + other_seconds
    differences = [new - old for old, new in zip(before, after, strict=True)]
    return SelfTest(
        positions=len(firsts),
        acceptance=_mean(firsts),
        calibration=calibration,
        other_activation=_mean(other_firsts),
        other_is_better=sum(differences) > 2 * math.sqrt(sum(map(abs, differences))),
    )


def self_test_heads(
    network: Medusa, model: nn.Module, tokenizer: TokenizerWrapper
) -> tuple[SelfTest, tuple[tuple[float, ...], ...]]:
    """`self_test` of Medusa heads, and `rank_accuracies` in the same texts."""
    network = _dequantised(network)
    texts = _decode_all(Target(model), tokenizer)
    firsts = [
        match for text in texts for match in _compare(network, heads.predict(network, text)[0])
    ]
    measured = SelfTest(len(firsts), _mean(firsts), heads.calibrate(network, texts))
    return measured, heads.rank_accuracies(network, texts)


def _dequantised(network: N) -> N:
    network = copy.deepcopy(network)
    dequantize_model(network)
    return network


def _decode_all(target: Target, tokenizer: TokenizerWrapper) -> list[ObservedSequence]:
    logger.info("decoding %d texts, to see which drafts the target accepts", len(PROMPTS))
    return [_decode(target, encode_question(tokenizer, prompt)) for prompt in PROMPTS]


def _decode(target: Target, prompt: list[int]) -> ObservedSequence:
    """Continue a prompt greedily."""
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
        columns.append((token, forward.hidden_states, best.indices.astype(mx.int32), log_probs))
        tokens += to_ints(token)
        if len(tokens) > TOKENS_PER_PROMPT:
            return ObservedSequence(
                *(mx.concatenate(list(rows)) for rows in zip(*columns, strict=True))
            )
        forward = target.advance(token, cache)


def _find_matches(
    drafter: Drafter, target: Target, texts: Sequence[ObservedSequence]
) -> tuple[list[int], list[int]]:
    """Compare first and second drafts with the target's tokens.

    Second drafts follow the target's first token, and depend more on the recurrence.

    Returns:
        First and second drafts, each 1 if equal to the target's token, else 0.
    """
    pairs = [predict(drafter, target.embed, text) for text in texts]
    firsts, seconds = (
        [match for prediction in column for match in _compare(drafter, prediction)]
        for column in zip(*pairs, strict=True)
    )
    return firsts, seconds


def _compare(drafter: DraftNetwork, prediction: Prediction) -> list[int]:
    rows = mx.argmax(prediction.logits, axis=-1)
    return to_ints(drafter.to_token_ids(rows) == prediction.chosen)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
