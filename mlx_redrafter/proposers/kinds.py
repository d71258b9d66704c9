"""Proposers of the networks that this package loads and trains."""

from __future__ import annotations

from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.proposers.context_drafting import AutoregressiveProposer
from mlx_redrafter.proposers.context_network import AutoregressiveNetwork, ContextNetwork
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.redrafter.proposer import RecurrentProposer
from mlx_redrafter.proposers.specformer.network import SpecFormer
from mlx_redrafter.proposers.specformer.proposer import SpecFormerProposer


def as_proposer(drafter: Drafter | ContextNetwork | Proposer) -> Proposer:
    """The proposer that a network of this package makes; others are returned as they are."""
    if isinstance(drafter, Drafter):
        return RecurrentProposer(drafter)
    if isinstance(drafter, SpecFormer):
        return SpecFormerProposer(drafter)
    if isinstance(drafter, AutoregressiveNetwork):
        return AutoregressiveProposer(drafter)
    assert not isinstance(drafter, ContextNetwork)
    return drafter
