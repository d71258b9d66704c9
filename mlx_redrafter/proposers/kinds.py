"""Proposers of the networks that this package loads and trains."""

from __future__ import annotations

from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.proposers.kv_drafter import AutoregressiveProposer
from mlx_redrafter.proposers.kv_network import AutoregressiveNetwork, KvNetwork
from mlx_redrafter.proposers.redrafter.network import Drafter
from mlx_redrafter.proposers.redrafter.proposer import RecurrentProposer
from mlx_redrafter.proposers.specformer.network import SpecFormer
from mlx_redrafter.proposers.specformer.proposer import SpecFormerProposer


def as_proposer(drafter: Drafter | KvNetwork | Proposer) -> Proposer:
    """The proposer that a network of this package makes; others are returned as they are."""
    if isinstance(drafter, Drafter):
        return RecurrentProposer(drafter)
    if isinstance(drafter, SpecFormer):
        return SpecFormerProposer(drafter)
    if isinstance(drafter, AutoregressiveNetwork):
        return AutoregressiveProposer(drafter)
    assert not isinstance(drafter, KvNetwork)
    return drafter
