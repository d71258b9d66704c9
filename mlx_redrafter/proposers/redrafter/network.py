"""The recurrent drafter: its network, which proposes from the target's last states alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.expansion import Expansion
from mlx_redrafter.proposers.joint import NetworkDrafting
from mlx_redrafter.proposers.redrafter.beam import expand_all
from mlx_redrafter.proposers.redrafter.input_table import input_lookup
from mlx_redrafter.proposers.redrafter.recurrence import Embed, RecurrentNetwork
from mlx_redrafter.proposers.scores import NoiseRank
from mlx_redrafter.target.target import Target


class Drafter(RecurrentNetwork):
    """A recurrent drafter, as `Proposer`; see `RecurrentNetwork` for its equations."""

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> RecurrentDrafting:
        return RecurrentDrafting(self, input_lookup(self, target), couple_noise)


class RecurrentDrafting(NetworkDrafting):
    """Drafts of one sequence."""

    def __init__(self, network: RecurrentNetwork, project_input: Embed, couple_noise: bool):
        self.network, self.couple_noise = network, couple_noise
        self.project_input = project_input

    def expand(
        self,
        draftings: Sequence[RecurrentDrafting],
        flights: Sequence[PendingPass],
        shape: DraftShape,
        rank: NoiseRank | None,
    ) -> Expansion:
        hidden = mx.stack([flight.hidden_state for flight in flights])
        roots = mx.concatenate([flight.root for flight in flights])
        return expand_all(self.network, self.project_input, hidden, roots, shape, rank)
