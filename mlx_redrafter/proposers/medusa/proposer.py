"""Medusa heads as a proposer: nothing of a text is kept but the target's last state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH, DraftPlan
from mlx_redrafter.proposers.expansion import build_tree
from mlx_redrafter.proposers.factorised import FactorisedLevels
from mlx_redrafter.proposers.medusa.network import Medusa
from mlx_redrafter.proposers.medusa.ranks import ranked_levels
from mlx_redrafter.proposers.redrafter.proposer import check_sizes
from mlx_redrafter.proposers.search import Rank, search
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree


class MedusaProposer:
    """Medusa heads among the proposers; see `Proposer`.

    Args:
        network: The heads.
    """

    num_layers = 0

    def __init__(self, network: Medusa):
        self.network = network

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """See `Proposer.modules`."""
        return (self.network,)

    @property
    def num_rows(self) -> int:
        """See `Proposer.num_rows`; of a static tree the ranks."""
        config = self.network.config
        accuracies = config.static_accuracies
        return config.head_rows if accuracies is None else len(accuracies[0])

    @property
    def max_length(self) -> int:
        """See `Proposer.max_length`; a token for every head."""
        return min(1 + self.network.config.num_heads, MAX_BEAM_LENGTH)

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """See `Proposer.check_fit`."""
        check_sizes(
            self.network.config, target.hidden_size, target.vocab_size, tokenizer.vocab_size
        )

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> MedusaDrafting:
        """See `Proposer.open`."""
        return MedusaDrafting(self.network, couple_noise)


class MedusaDrafting:
    """One text's drafts; see `Drafting`."""

    reader = None

    def __init__(self, network: Medusa, couple_noise: bool):
        self.network = network
        self.couple_noise = couple_noise

    def outlook(self) -> None:
        """See `Drafting.outlook`."""

    def propose(self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        """See `Drafting.propose`."""
        network, config = self.network, self.network.config
        hidden = flight.hidden_state[None]
        rank: Rank | None = None
        scale = config.inverse_temperature
        if noise is not None and self.couple_noise:
            token_ids = network.token_ids if network.has_draft_vocab else None
            rank = partial(noise.rank, token_ids=token_ids, weight=config.coupling_weight)
            scale = 1.0  # see `beam.expand`

        def log_probs(depth: int) -> mx.array:
            found = network.log_probs(hidden, depth, scale)
            return found if rank is None else rank(found, depth)

        if config.static_accuracies is None:
            levels = FactorisedLevels(log_probs, config.head_rows, network.to_token_ids)
        else:
            levels = ranked_levels(log_probs, config.static_accuracies, network.to_token_ids)
        return build_tree(search(levels, plan.shape), flight.root, plan)

    def skip(self, flight: PendingPass) -> None:
        """See `Drafting.skip`; nothing is remembered."""

    def settle(self, length: int) -> None:
        """See `Drafting.settle`; there are no caches."""
