"""The recurrent drafter: its network, which proposes from the target's last states alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_redrafter.decoding.protocols import Wish
from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.proposers.draft_network import StatelessDrafting
from mlx_redrafter.proposers.expansion import Expansion, build_tree
from mlx_redrafter.proposers.joint import NetworkDrafting
from mlx_redrafter.proposers.redrafter.beam import coupled_rank, expand, expand_all
from mlx_redrafter.proposers.redrafter.input_table import input_lookup
from mlx_redrafter.proposers.redrafter.recurrence import Embed, RecurrentNetwork
from mlx_redrafter.proposers.scores import NoiseRank, Rank
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree


class Drafter(RecurrentNetwork):
    """A recurrent drafter, as `Proposer`; see `RecurrentNetwork` for its equations."""

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> RecurrentDrafting:
        return RecurrentDrafting(self, input_lookup(self, target), couple_noise)


class RecurrentDrafting(StatelessDrafting, NetworkDrafting):
    """Drafts of one sequence."""

    reader = None

    def __init__(self, drafter: RecurrentNetwork, project_input: Embed, couple_noise: bool):
        self.drafter = drafter
        self.project_input = project_input
        self.couple_noise = couple_noise

    def propose(self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        found = expand(
            self.drafter,
            self.project_input,
            flight.hidden_state,
            flight.root,
            plan.shape,
            self.rank(noise),
        )
        return build_tree(found, flight.root, plan)

    def expand_all(self, wishes: Sequence[Wish], rank: Rank | None) -> Expansion:
        hidden = mx.stack([one.pending.hidden_state for one in wishes])
        roots = mx.concatenate([one.pending.root for one in wishes])
        shape = wishes[0].plan.shape
        return expand_all(self.drafter, self.project_input, hidden, roots, shape, rank)

    def rank(self, noise: GumbelNoise | None) -> NoiseRank | None:
        """Return the function that ranks drafts, given the noise of the target's choices."""
        return coupled_rank(self.drafter, noise) if self.couple_noise else None
