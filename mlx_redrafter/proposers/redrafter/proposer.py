"""The recurrent drafter as a proposer: it keeps nothing of a text but the target's last states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.expansion import build_tree
from mlx_redrafter.proposers.redrafter.beam import RecurrentBranches, expand, ranking
from mlx_redrafter.proposers.redrafter.input_table import input_lookup
from mlx_redrafter.proposers.redrafter.network import Drafter, Embed
from mlx_redrafter.proposers.search import Rank
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree


class RecurrentProposer:
    """A recurrent drafter among the proposers; see `Proposer`.

    Args:
        drafter: The network.
    """

    num_layers = 0
    max_length: int | None = None

    def __init__(self, drafter: Drafter):
        self.drafter = drafter

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """See `Proposer.modules`."""
        return (self.drafter,)

    @property
    def num_rows(self) -> int:
        """See `Proposer.num_rows`."""
        return self.drafter.config.head_rows

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """See `Proposer.check_fit`."""
        check_sizes(
            self.drafter.config, target.hidden_size, target.vocab_size, tokenizer.vocab_size
        )
        if self.drafter.config.captured_layers is not None:
            target.watch(self.drafter.config.captured_layers)

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> RecurrentDrafting:
        """See `Proposer.open`."""
        return RecurrentDrafting(self.drafter, input_lookup(self.drafter, target), couple_noise)


class RecurrentDrafting:
    """One text's drafts; see `Drafting`, and `StateReader` for drafters that read layers."""

    def __init__(self, drafter: Drafter, project_input: Embed, couple_noise: bool):
        self.drafter = drafter
        self.project_input = project_input
        self.couple_noise = couple_noise
        self.layers: Sequence[int] = drafter.config.captured_layers or ()

    @property
    def reader(self) -> RecurrentDrafting | None:
        """See `Drafting.reader`."""
        return self if self.layers else None

    def read(self, states: mx.array) -> None:
        """See `StateReader.read`; nothing is remembered."""

    def outlook(self) -> None:
        """See `Drafting.outlook`."""

    def propose(self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        """See `Drafting.propose`."""
        expansion = expand(
            self.drafter,
            self.project_input,
            self.origin(flight),
            flight.root,
            plan.shape,
            self.rank(noise),
        )
        return build_tree(expansion, flight.root, plan)

    def branch(
        self, tree: TokenTree, origin: mx.array | None, noise: GumbelNoise | None
    ) -> RecurrentBranches:
        """See `Branching.branch`."""
        assert origin is not None
        scale = self.drafter.config.inverse_temperature if self.rank(noise) is None else 1.0
        return RecurrentBranches(self.drafter, self.project_input, origin, tree, scale)

    def rank(self, noise: GumbelNoise | None) -> Rank | None:
        """See `Branching.rank`."""
        return ranking(self.drafter, noise) if noise is not None and self.couple_noise else None

    def origin(self, flight: PendingPass) -> mx.array:
        """What predicted the root, shape (H,)."""
        if not self.layers:
            return flight.hidden_state
        return self.drafter.fuse(flight.path_states[flight.num_accepted])[0]

    def skip(self, flight: PendingPass) -> None:
        """See `Drafting.skip`; nothing is remembered."""

    def settle(self, length: int) -> None:
        """See `Drafting.settle`; there are no caches."""


class Sizes(Protocol):
    """A config of a network that drafts for one target."""

    @property
    def hidden_size(self) -> int:
        """The target's hidden size."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        ...


def check_sizes(
    config: Sizes,
    hidden_size: int | None,
    vocab_size: int | None,
    tokenizer_size: int | None = None,
) -> None:
    """Check that a drafter's sizes are those of a target, as far as these are known.

    A vocabulary smaller than the target's embedding is accepted if it covers the tokenizer: the
    rows beyond are padding.

    Args:
        config: The drafter's.
        hidden_size: The target's hidden size.
        vocab_size: Rows of the target's embedding.
        tokenizer_size: Number of tokens of the tokenizer.

    Raises:
        CheckpointError: The drafter is for another target.
    """
    if hidden_size is not None and config.hidden_size != hidden_size:
        raise CheckpointError(
            f"the drafter's hidden_size {config.hidden_size} does not match the target's "
            f"{hidden_size}; use a drafter trained for this model"
        )
    if vocab_size is None:
        return
    least = 0 if tokenizer_size is None else min(tokenizer_size, vocab_size)
    if not least <= config.vocab_size <= vocab_size:
        raise CheckpointError(
            f"the drafter's vocab_size {config.vocab_size} does not match the target's "
            f"{vocab_size}; use a drafter trained for this model"
        )
