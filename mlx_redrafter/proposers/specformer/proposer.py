"""SpecFormer as a proposer: one pass of its own per step, whatever the shape of the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH, DraftShape
from mlx_redrafter.proposers.draft_model import log_probs
from mlx_redrafter.proposers.expansion import Expansion
from mlx_redrafter.proposers.factorised import FactorisedLevels
from mlx_redrafter.proposers.kv_drafter import KvDrafting, KvProposer
from mlx_redrafter.proposers.search import Rank, search
from mlx_redrafter.proposers.specformer.network import SpecFormer
from mlx_redrafter.target.target import Target


class SpecFormerProposer(KvProposer):
    """A SpecFormer among the proposers; see `Proposer`."""

    network: SpecFormer

    @property
    def max_length(self) -> int:
        """See `Proposer.max_length`; a token for every slot."""
        return min(1 + self.network.config.num_slots, MAX_BEAM_LENGTH)

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> SpecFormerDrafting:
        """See `Proposer.open`."""
        return SpecFormerDrafting(self.network, target, prompt, couple_noise, cached)


class SpecFormerDrafting(KvDrafting):
    """One text's drafts by such a network."""

    network: SpecFormer

    def expand(self, flight: PendingPass, shape: DraftShape, rank: Rank | None) -> Expansion:
        """See `KvDrafting.expand`."""
        network = self.network
        slots = network.slots(self.read_flight(flight), shape.levels)[0]
        found = log_probs(network.logits(slots, self.target), network.num_rows)

        def of_depth(depth: int) -> mx.array:
            row = found[depth : depth + 1]
            return row if rank is None else rank(row, depth)

        levels = FactorisedLevels(of_depth, network.num_rows, lambda rows: rows.astype(mx.int32))
        return search(levels, shape)
