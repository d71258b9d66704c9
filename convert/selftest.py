"""The self-test, which measures whether a drafter was trained for a target.

The target decodes a few prompts greedily. After each token of the texts, the drafter's first draft
is compared with the target's next token. A config that can be read in several ways is tried in each
of them, and the result has the reading that the target clearly accepts more often.
"""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model

from mlx_redrafter.decoding.sampling import top_k
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.engine.prompt_encoding import encode_question
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.fit import TOP_TOKENS, Prediction, ReadSequence
from mlx_redrafter.proposers.kv_drafting import AutoregressiveNetwork, KvNetwork
from mlx_redrafter.target.hooks import FINAL
from mlx_redrafter.target.target import Target

logger = logging.getLogger(__name__)

# Acceptance below which the user is warned; fitting drafters reach about 0.5, chance about 0.001.
MIN_ACCEPTANCE = 0.2
# Number of tokens to predict after each prompt.
TOKENS_PER_PROMPT = 64
# Beginnings of the texts, of several kinds.
PROMPTS = (
    "Once upon a time, there was a little girl who lived near the sea.",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the first n prime numbers.",
    "What should I see in Rome in three days? Give me a plan for each day.",
)
# Name of a config's own reading.
AS_IT_SAYS = "as it says"

N = TypeVar("N", bound=DraftNetwork)


class Reading(NamedTuple, Generic[N]):
    """The reading of a network's config that its target accepts most.

    Attributes:
        matches: For each token of the texts, 1 if the first draft is the target's, else 0.
        texts: Texts of the target, with the states that the network reads.
        line: Readings that were tried and the result; empty if there was only one.
    """

    network: N
    matches: list[int]
    texts: list[ReadSequence]
    line: str

    @property
    def acceptance(self) -> float:
        """Share of the first drafts that are the target's token, 0 to 1."""
        return mean(self.matches)

    def warnings(self) -> list[str]:
        """Describe the likely mistake; return nothing if the drafter seems to fit."""
        if self.acceptance >= MIN_ACCEPTANCE:
            return []
        return [
            f"only {self.acceptance:.0%} of the first drafts match the target; the drafter was "
            "probably trained for another model, on other hidden states of this one, or hardly at "
            "all. Decoding stays exact, but is not faster"
        ]


def choose_reading(
    readings: Mapping[str, N],
    target: Target,
    tokenizer: TokenizerWrapper,
    predict: Callable[[N, Target, ReadSequence], Prediction],
) -> Reading[N]:
    """Compare first drafts with the target's tokens, by each reading of a network's config.

    The first reading is the config's own; another is chosen if it is better by more than chance.
    ``predict`` returns the first drafts of a network along a text.
    """
    wanted = {
        name: network.captured_layers(target) if isinstance(network, KvNetwork) else (FINAL,)
        for name, network in readings.items()
    }
    layers = sorted({layer for one in wanted.values() for layer in one})
    if layers != [FINAL]:
        target.modules.watch(layers)
    decoded = decode_all(target, tokenizer, layers)
    texts: dict[str, list[ReadSequence]] = {}
    found: dict[str, list[int]] = {name: [] for name in readings}
    for name, network in readings.items():
        texts[name] = [with_layers(text, layers, wanted[name]) for text in decoded]
        for text in texts[name]:
            predicted = predict(network, target, text)
            drafts = network.to_token_ids(mx.argmax(predicted.logits, axis=-1))
            found[name] += to_ints(drafts == predicted.chosen)
    own, *others = found
    best = max(others, key=lambda name: sum(found[name]), default=own)
    chosen = best if _is_clearly_better(found[best], found[own]) else own
    tried = ", ".join(f"{name} {mean(one):.0%}" for name, one in found.items())
    line = f"first drafts accepted by reading of the config: {tried}; used {chosen}"
    return Reading(readings[chosen], found[chosen], texts[chosen], line if others else "")


def predict_next(network: AutoregressiveNetwork, target: Target, text: ReadSequence) -> Prediction:
    """Predict the first draft after each generated token."""
    tokens, num_prompt, states, *tops = text
    pairs = network.fuse(states[:-1]), network.embed(tokens[1:-1], target)
    outputs = network(*pairs, network.make_cache())[num_prompt - 1 :]
    return Prediction(network.logits(outputs, target), *(array[1:] for array in tops))


def dequantised(network: N) -> N:
    """Copy a network without quantization: on a CPU, drafting is many times faster with it."""
    network = copy.deepcopy(network)
    dequantize_model(network)
    return network


def decode_all(
    target: Target, tokenizer: TokenizerWrapper, layers: Sequence[int]
) -> list[ReadSequence]:
    """Let a target continue `PROMPTS` greedily, and keep the states of watched layers."""
    logger.info("decoding %d texts, to measure how many drafts the target accepts", len(PROMPTS))
    return [_decode(target, encode_question(tokenizer, prompt), layers) for prompt in PROMPTS]


def _decode(target: Target, prompt: list[int], layers: Sequence[int]) -> ReadSequence:
    tokens, cache = list(prompt), target.caches.new()
    columns: list[tuple[mx.array, mx.array]] = []
    ids = mx.array(prompt, dtype=mx.int32)
    states: list[Any] = []
    if len(prompt) > 1:
        states.append(target.process_chunk(ids[:-1], cache, layers).states)
    outputs = target.advance(ids[-1:], cache, layers)
    while True:
        states.append(outputs.states)
        logits = outputs.logits.astype(mx.float32)
        values, indices = top_k(logits, min(TOP_TOKENS, target.vocab_size))
        columns.append((indices.astype(mx.int32), values - mx.logsumexp(logits)))
        token = indices[:, 0].astype(mx.int32)
        tokens += to_ints(token)
        if len(tokens) > len(prompt) + TOKENS_PER_PROMPT:
            tops = (mx.concatenate(list(rows)) for rows in zip(*columns, strict=True))
            return ReadSequence(mx.array(tokens), len(prompt), mx.concatenate(states), *tops)
        outputs = target.advance(token, cache, layers)


def with_layers(text: ReadSequence, read: Sequence[int], layers: Sequence[int]) -> ReadSequence:
    """Keep the states of some layers of those that were read."""
    parts = mx.split(text.states, len(read), axis=-1)
    return text._replace(states=mx.concatenate([parts[read.index(n)] for n in layers], axis=-1))


def _is_clearly_better(new: Sequence[int], old: Sequence[int]) -> bool:
    """Compare two series of matches, by two standard errors of their difference."""
    differences = [one - other for one, other in zip(new, old, strict=True)]
    return sum(differences) > 2 * math.sqrt(sum(map(abs, differences)))
