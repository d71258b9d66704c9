"""Proposers that add something to another one."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import mlx.nn as nn

from mlx_redrafter.decoding.protocols import Proposer
from mlx_redrafter.target.target import Target

P = TypeVar("P", bound=Proposer)


class Wrapper(Generic[P]):
    """The part of a `Proposer` that it has in common with the one inside."""

    def __init__(self, proposer: P):
        self.proposer = proposer

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        return self.proposer.networks

    @property
    def num_layers(self) -> int:
        return self.proposer.num_layers

    @property
    def num_rows(self) -> int | None:
        return self.proposer.num_rows

    @property
    def max_length(self) -> int | None:
        return self.proposer.max_length

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        self.proposer.check_fit(target, tokenizer)
