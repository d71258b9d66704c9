"""Drafts of several sequences in the same passes of their network, which reads its weights once.

Axes: R sequences, L beam length, V tokens that the network proposes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import StateReader, propose_in_turn
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.proposers.expansion import Expansion, build_tree, build_trees
from mlx_redrafter.proposers.scores import NoiseRank
from mlx_redrafter.trees.tree import TokenTree


class NetworkDrafting(ABC):
    """Drafts of one sequence by a network that may draft for several, a `JointDrafting`.

    Without entries of its own it keeps nothing between steps.

    Attributes:
        network: The network: ids of the rows of its head, and the weight of the noise.
        couple_noise: Whether to rank drafts with the noise that the target will sample with.
    """

    network: Any
    couple_noise: bool

    @property
    def reader(self) -> StateReader | None:
        return None

    @abstractmethod
    def expand(
        self,
        draftings: Sequence[Any],
        flights: Sequence[Pass],
        shape: DraftShape,
        rank: NoiseRank | None,
    ) -> Expansion:
        """Score continuations of the bonus tokens of passes.

        Args:
            draftings: Drafts of one or several sequences, of this class, this one's the first.
            flights: A pass of each of them.
            shape: As in `search_all`.
            rank: Function that ranks the rows of all sequences, in their order and equally many
                for each; None without noise.

        Returns:
            The result of `search_all`, one root for each sequence.
        """

    def rank(self, noise: GumbelNoise | None) -> NoiseRank | None:
        """Return the function that ranks drafts with the noise of the target's choices, if any."""
        if noise is None or not self.couple_noise:
            return None
        network = self.network
        return partial(noise.rank, token_ids=network.row_ids, weight=network.coupling_weight)

    def rank_all(self, noises: Sequence[GumbelNoise]) -> NoiseRank | None:
        """Return `rank` for the rows of several sequences, equally many of each and in their order.

        Their noise is of equally many depths, with parameters that differ in the seeds only.
        """
        count, values = len(noises), mx.concatenate([one.values for one in noises])
        rank = self.rank(GumbelNoise(noises[0].params, values))
        if rank is None:
            return None
        starts = mx.arange(count, dtype=mx.int32) * (values.shape[0] // count)

        def rank_rows(log_probs: mx.array, depth: int | mx.array, **options: Any) -> mx.array:
            depths = mx.repeat(starts, log_probs.shape[0] // count) + depth
            return rank(log_probs, depths, **options)

        return rank_rows

    @property
    def is_joint(self) -> bool:
        """Whether this sequence can be drafted for together with others."""
        return True

    def matches(self, least: float) -> None:  # noqa: B027
        """Return None, as a network always has something to propose."""

    def begin(self, flight: Pass) -> None:  # noqa: B027
        """Note a pass, after which a tree is drafted."""

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        self.begin(flight)
        found = self.expand([self], [flight], plan.shape, self.rank(noise))
        return build_tree(found.alone, flight.root, plan)

    def propose_all(
        self,
        draftings: Sequence[Any],
        flights: Sequence[Pass],
        plan: DraftPlan,
        noises: Sequence[GumbelNoise | None],
    ) -> list[TokenTree | None]:
        are_alike = all(one.couple_noise == self.couple_noise for one in draftings)
        if not (are_alike and all(one.is_joint for one in draftings)):
            return propose_in_turn(draftings, flights, plan, noises)
        for drafting, flight in zip(draftings, flights, strict=True):
            drafting.begin(flight)
        known = [one for one in noises if one is not None]
        found = self.expand(draftings, flights, plan.shape, self.rank_all(known) if known else None)
        return list(build_trees(found, [flight.root for flight in flights], plan))

    def skip(self, flight: Pass) -> None:  # noqa: B027
        """Ignore a pass without drafts."""

    def trim_to(self, length: int) -> None:  # noqa: B027
        """Leave everything, as there are no caches."""
