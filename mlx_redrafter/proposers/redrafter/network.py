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

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        super().check_fit(target, tokenizer)
        if self.config.captured_layers is not None:
            target.watch(self.config.captured_layers)

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> RecurrentDrafting:
        return RecurrentDrafting(self, input_lookup(self, target), couple_noise)


class RecurrentDrafting(StatelessDrafting, NetworkDrafting):
    """Drafts of one sequence."""

    def __init__(self, drafter: RecurrentNetwork, project_input: Embed, couple_noise: bool):
        self.drafter = drafter
        self.project_input = project_input
        self.couple_noise = couple_noise
        self.layers: Sequence[int] = drafter.config.captured_layers or ()

    @property
    def reader(self) -> RecurrentDrafting | None:
        """Itself if the drafter reads layers of the target, else None."""
        return self if self.layers else None

    def read(self, states: mx.array) -> None:
        """Ignore states of the prompt: the drafter reads those of the newest pass alone."""

    def propose(self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        origin, rank = self.origin(flight), self.rank(noise)
        found = expand(self.drafter, self.project_input, origin, flight.root, plan.shape, rank)
        return build_tree(found, flight.root, plan)

    def expand_all(self, wishes: Sequence[Wish], rank: Rank | None) -> Expansion:
        draftings: list[Any] = [one.drafting for one in wishes]
        pairs = zip(draftings, wishes, strict=True)
        origins = mx.stack([drafting.origin(one.pending) for drafting, one in pairs])
        roots = mx.concatenate([one.pending.root for one in wishes])
        shape = wishes[0].plan.shape
        return expand_all(self.drafter, self.project_input, origins, roots, shape, rank)

    def rank(self, noise: GumbelNoise | None) -> NoiseRank | None:
        """Return the function that ranks drafts, given the noise of the target's choices."""
        return coupled_rank(self.drafter, noise) if self.couple_noise else None

    def origin(self, flight: PendingPass) -> mx.array:
        """Return the state that predicted the root of a pass, shape (H,)."""
        if not self.layers:
            return flight.hidden_state
        return self.drafter.fuse(flight.path_states[flight.num_accepted])[0]
