"""Calibration of a recurrent drafter on sequences of its target."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_redrafter.proposers.fit import Calibration, ObservedSequence, Prediction, fit, parts
from mlx_redrafter.proposers.redrafter.recurrence import Embed, RecurrentNetwork


def predict(
    drafter: RecurrentNetwork, embed: Embed, text: ObservedSequence
) -> tuple[Prediction, Prediction]:
    """Predict first and second drafts with each token of a sequence, of at least three, as root."""
    entered = drafter.project_input(embed(text.tokens))
    hidden_states = text.hidden_states.astype(drafter.dtype)
    ids, log_probs = text.top_ids, text.top_log_probs
    state = drafter.start(entered[:-1])
    firsts = Prediction(drafter.logits(hidden_states[:-1], state), ids[1:], log_probs[1:])
    state = drafter.advance(state[:-1], entered[1:-1])
    seconds = Prediction(drafter.logits(hidden_states[:-2], state), ids[2:], log_probs[2:])
    return firsts, seconds


def calibrate(
    drafter: RecurrentNetwork, embed: Embed, texts: Iterable[ObservedSequence]
) -> Calibration:
    """Fit the scalars to as many sequences as `fit` needs; waits for the device."""
    return fit(drafter, (predict(drafter, embed, part) for text in texts for part in parts(text)))
