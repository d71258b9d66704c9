"""Calibration: one scalar that makes a drafter's probabilities the chances of being accepted.

Trees are made of the drafts with the largest products of probabilities, so what is too sharp makes
them too narrow and what is too flat makes them too broad. A greedy target's choice is certain
where a drafter trained on its distributions says what is probable, so most scales are above 1.

Axes: n tokens of a text, p predictions, V rows of the head, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import mlx.core as mx

from mlx_redrafter.beam import Embed
from mlx_redrafter.drafter import Drafter
from mlx_redrafter.host import to_floats

# The likelihood is concave in the scale, and flat near its maximum.
SCALES = tuple(2.0 ** (eighths / 8) for eighths in range(-16, 25))
# Predictions that a scale is fitted on, at least where there are as many, and at once.
ENOUGH = 4096
BATCH = 128


class Text(NamedTuple):
    """A text as a target has processed it.

    Attributes:
        tokens: Token ids, integer, shape (n,).
        hiddens: The target's last hidden states that predicted them, shape (n, H).
        chosen: The target's greedy choices instead of them, integer, shape (n,).
    """

    tokens: mx.array
    hiddens: mx.array
    chosen: mx.array


class Prediction(NamedTuple):
    """Drafts where the drafts before them were right.

    Attributes:
        logits: The drafter's, shape (p, V).
        chosen: The target's greedy choices, integer, shape (p,).
    """

    logits: mx.array
    chosen: mx.array


def predict(drafter: Drafter, embed: Embed, text: Text) -> tuple[Prediction, Prediction]:
    """First and second drafts with each token of a text, of at least three, as the root."""
    embeddings = embed(text.tokens).astype(drafter.dtype)
    hiddens = text.hiddens.astype(drafter.dtype)
    state = drafter.start(embeddings[:-1])
    firsts = Prediction(drafter.logits(hiddens[:-1], state), text.chosen[1:])
    state = drafter.advance(state[:-1], embeddings[1:-1])
    return firsts, Prediction(drafter.logits(hiddens[:-2], state), text.chosen[2:])


def fit_score_scale(drafter: Drafter, embed: Embed, texts: Iterable[Text]) -> float:
    """The scale of its logits under which a drafter finds a greedy target's choices most probable.

    Args:
        drafter: The network.
        embed: The target's input embedding.
        texts: As many as wanted; those beyond `ENOUGH` predictions are not read.

    Returns:
        One of `SCALES`, 1 if there is no prediction. Waits for the device.
    """
    losses, count = [0.0] * len(SCALES), 0
    for text in texts:
        if count >= ENOUGH:
            break
        for part in _parts(text):
            for prediction in predict(drafter, embed, part):
                losses = [a + b for a, b in zip(losses, _losses(drafter, prediction), strict=True)]
            count += 2 * part.tokens.shape[0] - 3
    return SCALES[losses.index(min(losses))] if count else 1.0


def _parts(text: Text) -> Iterator[Text]:
    length = text.tokens.shape[0]
    for start in range(0, length, BATCH):
        part = Text(*(array[start : start + BATCH] for array in text))
        if part.tokens.shape[0] > 2:
            yield part


def _losses(drafter: Drafter, prediction: Prediction) -> list[float]:
    """Nats of the choices under each of `SCALES`; those that the head cannot propose count 0."""
    logits = prediction.logits.astype(mx.float32)
    is_row = drafter.to_token_ids(mx.arange(logits.shape[-1])) == prediction.chosen[:, None]
    row = mx.argmax(is_row, axis=-1, keepdims=True)
    right = mx.take_along_axis(logits, row, axis=-1)[:, 0]
    known = mx.any(is_row, axis=-1)
    losses = [
        mx.sum(known * (mx.logsumexp(scale * logits, axis=-1) - scale * right)) for scale in SCALES
    ]
    return to_floats(mx.stack(losses))
