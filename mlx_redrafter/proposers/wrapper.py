"""Proposers that add something to another one."""

from __future__ import annotations

from typing import Generic, TypeVar

from mlx_redrafter.decoding.protocols import Proposer

P = TypeVar("P", bound=Proposer)


class Wrapper(Generic[P]):
    """The part of a `Proposer` that it has in common with the one inside."""

    def __init__(self, proposer: P):
        self.proposer = proposer
        self.networks, self.num_layers = proposer.networks, proposer.num_layers
        self.num_rows, self.max_length = proposer.num_rows, proposer.max_length
        self.check_fit = proposer.check_fit
