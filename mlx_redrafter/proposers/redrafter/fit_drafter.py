"""Calibration of a recurrent drafter on sequences of its target."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_redrafter.proposers.fit import Calibration, Prediction, ReadSequence, fit_depths, parts
from mlx_redrafter.proposers.redrafter.network import Drafter, Embed


def predict(drafter: Drafter, embed: Embed, text: ReadSequence) -> tuple[Prediction, Prediction]:
    """Predict first and second drafts with each generated token, of at least three, as root."""
    first = text.num_prompt
    entered = drafter.project_input(embed(text.tokens[first:]))
    hidden_states = text.states[first - 1 :].astype(drafter.dtype)
    ids, log_probs = text.top_ids, text.top_log_probs
    state = drafter.start(entered[:-1])
    firsts = Prediction(drafter.logits(hidden_states[:-1], state), ids[1:], log_probs[1:])
    state = drafter.advance(state[:-1], entered[1:-1])
    seconds = Prediction(drafter.logits(hidden_states[:-2], state), ids[2:], log_probs[2:])
    return firsts, seconds


def calibrate(drafter: Drafter, embed: Embed, texts: Iterable[ReadSequence]) -> Calibration:
    """Fit the scalars to as many sequences as `fit_depths` needs; waits for the device."""
    found = (predict(drafter, embed, part) for text in texts for part in parts(text))
    return fit_depths(drafter, found)[0]
