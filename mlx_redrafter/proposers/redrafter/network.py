"""The recurrent drafter: its network, which proposes from the target's last states alone.

Axes: R roots, W beam width, H hidden size, V head rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.expansion import Expansion
from mlx_redrafter.proposers.joint import NetworkDrafting
from mlx_redrafter.proposers.redrafter.input_table import input_lookup
from mlx_redrafter.proposers.redrafter.recurrence import Embed, RecurrentNetwork
from mlx_redrafter.proposers.scores import NoiseRank
from mlx_redrafter.proposers.search import search_all
from mlx_redrafter.target.target import Target


class Drafter(RecurrentNetwork):
    """A recurrent drafter, as `Proposer`; see `RecurrentNetwork` for its equations."""

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> RecurrentDrafting:
        return RecurrentDrafting(self, input_lookup(self, target), couple_noise)


class RecurrentDrafting(NetworkDrafting):
    """Drafts of one sequence."""

    def __init__(self, network: Drafter, project_input: Embed, couple_noise: bool):
        self.network, self.couple_noise = network, couple_noise
        self.project_input = project_input

    def expand(
        self,
        draftings: Sequence[RecurrentDrafting],
        flights: Sequence[Pass],
        shape: DraftShape,
        rank: NoiseRank | None,
    ) -> Expansion:
        hidden = mx.stack([flight.hidden_state for flight in flights])
        roots = mx.concatenate([flight.root for flight in flights])
        levels = RecurrentLevels(self.network, self.project_input, hidden, roots, rank is not None)
        return search_all(levels, shape, rank)


class RecurrentLevels:
    """A recurrent drafter after R roots, mostly one; a `LevelScorer`.

    Args:
        drafter: The network.
        project_input: `RecurrentNetwork.project_input` of tokens: ids of shape (n,) to rows of
            shape (n, H).
        hidden_state: The target's last hidden states that predicted the roots, shape (R, H).
        root: The newest tokens, integer, shape (R,).
        with_noise: Whether noise ranks the drafts. The noise of a sampling target makes its choices
            as uncertain as the drafter's probabilities say, so the inverse temperature applies only
            without it.
    """

    def __init__(
        self,
        drafter: RecurrentNetwork,
        project_input: Embed,
        hidden_state: mx.array,
        root: mx.array,
        with_noise: bool = False,
    ):
        self.drafter = drafter
        self.project_input = project_input
        self.hidden_state = hidden_state.astype(drafter.dtype)
        self.hidden_term = drafter.hidden_term(self.hidden_state)
        self.root = root
        self.scale = 1.0 if with_noise else drafter.config.inverse_temperature
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
