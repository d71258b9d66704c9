"""Calibration: two scalars that make a drafter's probabilities the chances of being accepted.

Trees are made of the drafts with the largest products of probabilities, so what is too sharp makes
them too narrow and what is too flat makes them too broad. A greedy target's choice is certain
where a drafter trained on its distributions says what is probable, so most score scales are above
1. At a temperature drafts are ranked with a weight of the noise that the target chooses with: the
more of it, the better the drafter knows the target's distribution; all of it would outweigh what a
poor one knows.

Axes: n tokens of a text, k most probable tokens, p predictions, V rows of the head, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, TypeVar

import mlx.core as mx

from mlx_redrafter.device_read import to_floats, to_ints
from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.redrafter.config import DrafterConfig
from mlx_redrafter.proposers.redrafter.network import Drafter, Embed
from mlx_redrafter.proposers.stored_config import KEYS

SCALES = tuple(2.0 ** (eighths / 8) for eighths in range(-16, 25))
WEIGHTS = tuple(twentieths / 20 for twentieths in range(4, 21))
# Texts are mostly sampled near this temperature; the best weight changes little with it.
TEMP = 0.8
# Most probable tokens of the target that are looked at. At a temperature even an improbable one is
# drawn now and then: for the bundled model's second drafter the best weight seemed to be 0.85 with
# 32 of the 4,096 tokens, with 512 it was 0.95, as it was with all.
TOP_TOKENS = 512
# Predictions that are looked at, at least where there are as many, and at once.
ENOUGH = 8192
BATCH = 128

C = TypeVar("C")


@dataclass(frozen=True)
class Calibration:
    """The scalars of `DrafterConfig` that say how drafts are ranked.

    Attributes:
        inverse_temperature: Factor on the drafter's logits that maximises the likelihood of the
            target's greedy tokens.
        coupling_weight: Weight of the noise that makes most first ranks what the target samples at
            `TEMP`.
    """

    inverse_temperature: float = DrafterConfig.inverse_temperature
    coupling_weight: float = DrafterConfig.coupling_weight

    def to_dict(self) -> dict[str, float]:
        """The scalars under their keys in a ``config.json``."""
        return {KEYS[name]: value for name, value in asdict(self).items()}

    def applied(self, config: C) -> C:
        """The config of a drafter of any kind with these scalars."""
        return replace(  # type: ignore[type-var]
            config,
            inverse_temperature=self.inverse_temperature,
            coupling_weight=self.coupling_weight,
        )


class ObservedSequence(NamedTuple):
    """A text as a target has processed it.

    Attributes:
        tokens: Token ids, integer, shape (n,).
        hidden_states: The target's last hidden states that predicted them, shape (n, H).
        top_ids: The tokens that it found most probable there, best first, integer, shape (n, k).
        top_log_probs: Their natural log-probabilities, shape (n, k).
    """

    tokens: mx.array
    hidden_states: mx.array
    top_ids: mx.array
    top_log_probs: mx.array


class Prediction(NamedTuple):
    """Drafts where the drafts before them were right.

    Attributes:
        logits: The drafter's, shape (p, V).
        top_ids: As in `ObservedSequence`, shape (p, k).
        top_log_probs: As in `ObservedSequence`, shape (p, k).
    """

    logits: mx.array
    top_ids: mx.array
    top_log_probs: mx.array

    @property
    def chosen(self) -> mx.array:
        """The target's greedy choices, integer, shape (p,)."""
        return self.top_ids[:, 0]


def predict(
    drafter: Drafter, embed: Embed, text: ObservedSequence
) -> tuple[Prediction, Prediction]:
    """First and second drafts with each token of a text, of at least three, as the root."""
    entered = drafter.project_input(embed(text.tokens))
    hidden_states = text.hidden_states.astype(drafter.dtype)
    ids, log_probs = text.top_ids, text.top_log_probs
    state = drafter.start(entered[:-1])
    firsts = Prediction(drafter.logits(hidden_states[:-1], state), ids[1:], log_probs[1:])
    state = drafter.advance(state[:-1], entered[1:-1])
    seconds = Prediction(drafter.logits(hidden_states[:-2], state), ids[2:], log_probs[2:])
    return firsts, seconds


def calibrate(drafter: Drafter, embed: Embed, texts: Iterable[ObservedSequence]) -> Calibration:
    """The scalars that fit texts; waits for the device.

    Args:
        drafter: The network.
        embed: The target's input embedding.
        texts: Any number of texts; those beyond `ENOUGH` predictions are not read.
    """
    return fit(drafter, (predict(drafter, embed, part) for text in texts for part in parts(text)))


def fit(drafter: DraftNetwork, predictions: Iterable[Iterable[Prediction]]) -> Calibration:
    """The scalars that fit predictions; waits for the device.

    Args:
        drafter: The network.
        predictions: Its predictions, part by part; parts beyond `ENOUGH` are not asked for.
    """
    nats, matches, count = [0.0] * len(SCALES), [0] * len(WEIGHTS), 0
    for part in predictions:
        for prediction in part:
            nats = [a + b for a, b in zip(nats, _nats(drafter, prediction), strict=True)]
            noise = mx.random.key(count)
            found = _matches(drafter, prediction, noise)
            matches = [a + b for a, b in zip(matches, found, strict=True)]
            count += prediction.logits.shape[0]
        if count >= ENOUGH:
            break
    if count == 0:
        return Calibration()
    return Calibration(SCALES[nats.index(min(nats))], WEIGHTS[matches.index(max(matches))])


def parts(text: ObservedSequence, least: int = 3) -> Iterator[ObservedSequence]:
    """Parts of `BATCH` tokens; those with fewer than ``least`` are left out."""
    length = text.tokens.shape[0]
    for start in range(0, length, BATCH):
        part = ObservedSequence(*(array[start : start + BATCH] for array in text))
        if part.tokens.shape[0] >= least:
            yield part


def _nats(drafter: DraftNetwork, prediction: Prediction) -> list[float]:
    """Nats of the choices under each of `SCALES`; those that the head cannot propose count 0."""
    logits = prediction.logits.astype(mx.float32)
    is_row = drafter.to_token_ids(mx.arange(logits.shape[-1])) == prediction.chosen[:, None]
    row = mx.argmax(is_row, axis=-1, keepdims=True)
    right = mx.take_along_axis(logits, row, axis=-1)[:, 0]
    known = mx.any(is_row, axis=-1)
    nats = [
        mx.sum(known * (mx.logsumexp(scale * logits, axis=-1) - scale * right)) for scale in SCALES
    ]
    return to_floats(mx.stack(nats))


def _matches(drafter: DraftNetwork, prediction: Prediction, key: mx.array) -> list[int]:
    """Under each of `WEIGHTS`, how many first ranks are what the target samples."""
    rows = prediction.logits.shape[0]
    noise = mx.random.gumbel((rows, drafter.config.vocab_size), key=key)
    top_noise = mx.take_along_axis(noise, prediction.top_ids, axis=-1)
    best = mx.argmax(prediction.top_log_probs / TEMP + top_noise, axis=-1, keepdims=True)
    sampled = mx.take_along_axis(prediction.top_ids, best, axis=-1)[:, 0]
    logits = prediction.logits.astype(mx.float32) / TEMP
    own_noise = noise[:, drafter.to_token_ids(mx.arange(logits.shape[-1]))]
    matches = [
        mx.sum(drafter.to_token_ids(mx.argmax(logits + weight * own_noise, axis=-1)) == sampled)
        for weight in WEIGHTS
    ]
    return to_ints(mx.stack(matches))
