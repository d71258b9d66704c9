"""What decoding asks of those who propose tokens, and of those who say how many.

Axes: N nodes of a tree, L beam length, M nodes of the largest tree on offer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree


@runtime_checkable
class Proposer(Protocol):
    """Proposes tokens for any number of texts: weights and tables, which threads may share."""

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """Its networks, none for a lookup; step times are stored by their tensors."""
        ...

    @property
    def num_layers(self) -> int:
        """Number of its caches in a prompt cache, after those of the target."""
        ...

    @property
    def num_rows(self) -> int | None:
        """Number of tokens that it can propose; None where a network's head does not bound it."""
        ...

    @property
    def max_length(self) -> int | None:
        """Longest beams that it can draft, root included; None where nothing bounds them."""
        ...

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """Raise `CheckpointError` unless it can draft for ``target``."""
        ...

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> Drafting:
        """Begin a text.

        Args:
            target: The model whose text it is.
            prompt: Token ids that are processed first.
            couple_noise: Whether drafts are ranked with the noise that the target will sample with.
            cached: mlx-lm caches of the proposer out of a prompt cache, [] where there are none.
        """
        ...


class StateReader(Protocol):
    """One text's reader of states that the target has within."""

    @property
    def layers(self) -> Sequence[int]:
        """Layers of the target whose inputs it reads, and `target.FINAL`; at least one."""
        ...

    def read(self, states: mx.array) -> None:
        """Take in the states of the next prompt tokens, all but the last of them.

        Args:
            states: States after a chunk of n tokens, as in `PendingPass.states`, shape (n, S).
        """
        ...


class Drafting(Protocol):
    """One text's drafts, with all state that belongs to this text.

    After every forward pass of the target exactly one of `propose` and `skip` is called. What a
    pass after `propose` accepts is of those drafts.
    """

    @property
    def reader(self) -> StateReader | None:
        """What reads states of every pass; None where the drafts need none."""
        ...

    def outlook(self) -> Sequence[float] | None:
        """Probabilities of the drafts that a lookup in the text would propose now, best first.

        Empty where there is nothing to look up; None for a network, which always has something.
        Known from tokens that the host has read, without waiting for the device.
        """
        ...

    def propose(
        self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None
    ) -> TokenTree | None:
        """Draft what may follow a forward pass.

        Args:
            flight: The pass. Its arrays may not be computed yet; its ``tokens`` wait for them, and
                a network should not ask for those.
            plan: Plan of the drafts, its beams no longer than `Proposer.max_length`.
            noise: Noise of the target's choices after nodes of each depth below L; None where there
                is none.

        Returns:
            A tree of at most ``plan.num_nodes`` nodes and depths below ``plan.shape.length``, its
            siblings distinct, rooted in ``flight.root``; None where there is nothing to propose.
        """
        ...

    def skip(self, flight: PendingPass) -> None:
        """Take note of a pass after which nothing is drafted; the host knows its tokens."""
        ...

    def settle(self, length: int) -> None:
        """End the text: caches from outside hold exactly the first ``length`` tokens."""
        ...


class Proposal(NamedTuple):
    """Dispatched drafts or none, the plan they follow, and the noise of the choices after them."""

    plan: DraftPlan
    tree: TokenTree | None
    noise: GumbelNoise | None


class Step(NamedTuple):
    """One step, as its policy hears of it.

    Attributes:
        plan: Plan of its drafts; None where nothing was drafted.
        num_nodes: Nodes verified, root included.
        tokens: Accepted drafts and the target's own token after them.
        seconds: Time from the outcome before to this one; None where the caller kept the decoder
            waiting.
    """

    plan: DraftPlan | None
    num_nodes: int
    tokens: list[int]
    seconds: float | None


class DraftPolicy(Protocol):
    """Says how much every step drafts and verifies; no text depends on it."""

    @property
    def only_looks(self) -> bool:
        """Whether `keep` keeps nothing of the plan that was chosen last, whatever is drafted."""
        ...

    def choose(self, outlook: Sequence[float] | None) -> DraftPlan | None:
        """The plan of the next step, None for plain decoding.

        Args:
            outlook: Probabilities from `Drafting.outlook`.
        """
        ...

    def keep(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """The nodes worth verifying, as a tree; the root alone to decode plainly.

        Args:
            plan: The plan that `choose` returned.
            tree: The drafts, which the policy may wait for unless it `only_looks`.
        """
        ...

    def observe(self, step: Step) -> None:
        """Learn from a finished step."""
        ...
