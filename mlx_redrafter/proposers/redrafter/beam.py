"""Beam search with the recurrent drafter.

Axes: R roots, W beam width, H hidden size, V head rows.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.expansion import Expansion
from mlx_redrafter.proposers.redrafter.recurrence import Embed, RecurrentNetwork
from mlx_redrafter.proposers.scores import Rank
from mlx_redrafter.proposers.search import search_all


def score_scale(drafter: RecurrentNetwork, rank: Rank | None) -> float:
    """Return the factor on the drafter's logits.

    The noise of a sampling target makes its choices as uncertain as the drafter's probabilities
    say, so the inverse temperature applies only if no noise ranks.
    """
    return drafter.config.inverse_temperature if rank is None else 1.0


class RecurrentLevels:
    """A recurrent drafter after R roots, mostly one; a `LevelScorer`.

    Args:
        drafter: The network.
        project_input: `RecurrentNetwork.project_input` of tokens: ids of shape (n,) to rows of
            shape (n, H).
        hidden_state: The target's last hidden states that predicted the roots, shape (R, H).
        root: The newest tokens, integer, shape (R,).
        scale: Factor on the logits.
    """

    def __init__(
        self,
        drafter: RecurrentNetwork,
        project_input: Embed,
        hidden_state: mx.array,
        root: mx.array,
        scale: float,
    ):
        self.drafter = drafter
        self.project_input = project_input
        self.hidden_state = hidden_state.astype(drafter.dtype)
        self.hidden_term = drafter.hidden_term(self.hidden_state)
        self.root = root
        self.scale = scale
        self.num_rows = drafter.num_rows
        self.to_token_ids = drafter.to_token_ids

    def first(self) -> mx.array:
        self.state = self.drafter.start(self.project_input(self.root))  # (R, H)
        return self.log_probs()

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """Advance the beams; those of the first level share the root's state."""
        state = self.state if beams is None else self.state[beams]
        self.state = self.drafter.advance(state, self.project_input(tokens))  # (W, H)
        return self.log_probs()

    def log_probs(self) -> mx.array:
        """Return natural log-probabilities after the newest tokens, float32, one row for each."""
        hidden, term = self.hidden_state, self.hidden_term
        num_roots, count = hidden.shape[0], self.state.shape[0]
        if num_roots not in (1, count):
            hidden = mx.repeat(hidden, count // num_roots, axis=0)
            term = None if term is None else mx.repeat(term, count // num_roots, axis=0)
        return self.drafter.log_probs(hidden, self.state, term, self.scale)


def expand(
    drafter: RecurrentNetwork,
    project_input: Embed,
    hidden_state: mx.array,
    root: mx.array,
    shape: DraftShape,
    rank: Rank | None = None,
) -> Expansion:
    """Search after one root, given its hidden state of shape (H,); see `RecurrentLevels`."""
    return expand_all(drafter, project_input, hidden_state[None], root, shape, rank).alone


def expand_all(
    drafter: RecurrentNetwork,
    project_input: Embed,
    hidden_states: mx.array,
    roots: mx.array,
    shape: DraftShape,
    rank: Rank | None = None,
) -> Expansion:
    """Search after R roots; see `search_all`, and `RecurrentLevels` for the arguments."""
    scale = score_scale(drafter, rank)
    levels = RecurrentLevels(drafter, project_input, hidden_states, roots, scale)
    return search_all(levels, shape, rank)
