"""Protocols of decoding: proposers of tokens, and policies that choose how many to draft.

Axes: N nodes of a tree, L beam length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree


@runtime_checkable
class Proposer(Protocol):
    """Weights or tables that propose tokens for any number of sequences; threads may share it."""

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """Its networks, if it has any; step times are stored by their tensors."""

    @property
    def num_layers(self) -> int:
        """Number of its caches in a prompt cache, after those of the target."""

    @property
    def num_rows(self) -> int | None:
        """Size of the draft vocabulary; None if it is the target's."""

    @property
    def max_length(self) -> int | None:
        """Maximum length of its beams, root included; None without a limit."""

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """Raise `CheckpointError` unless it can draft for ``target``."""

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> Drafting:
        """Begin a sequence.

        Args:
            target: The model that decodes it.
            prompt: Token ids.
            couple_noise: Whether to rank drafts with the noise that the target will sample with.
            cached: mlx-lm caches of the proposer from a prompt cache; [] without one.
        """


class StateReader(Protocol):
    """One sequence's reader of inner states of the target."""

    @property
    def layers(self) -> Sequence[int]:
        """Layers of the target whose inputs it reads, and `target.FINAL`; at least one."""

    def read(self, states: mx.array) -> None:
        """Read states after the next n tokens of the prompt, as in `Results.states`, shape (n, S).

        The last token of the prompt is left out.
        """


class Drafting(Protocol):
    """One sequence's drafts, with all state that belongs to this sequence.

    The decoder calls exactly one of `propose` and `skip` after every forward pass of the target.
    """

    @property
    def reader(self) -> StateReader | None:
        """Reader of the states of every pass; None if the drafts need none."""

    def matches(self, least: float) -> Sequence[float] | None:
        """Return the probabilities of the drafts that prompt lookup would propose now, best first.

        Empty if it finds nothing; None for other kinds than prompt lookup. It uses the tokens that
        the host has read, and never waits. It may omit drafts of less than ``least``.
        """

    def propose(
        self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None, /
    ) -> TokenTree | None:
        """Draft tokens that may follow a forward pass.

        Its arrays may not be computed yet, and its ``tokens`` wait for them. The plan's beams are
        no longer than `Proposer.max_length`. The noise is that of the target's choices after nodes
        of each depth below L. The tree is rooted in ``flight.root``, has at most ``plan.num_nodes``
        nodes, depths below ``plan.shape.length`` and distinct siblings; None if there is nothing to
        propose.
        """

    def skip(self, flight: Pass, /) -> None:
        """Note a pass after which nothing is drafted; the host has read its tokens."""

    def trim_to(self, length: int) -> None:
        """End the sequence: the caller's caches hold exactly the first ``length`` tokens."""


# Drafts of sequences, each with the pass that they follow.
Group = Sequence[tuple[Any, Pass]]


@runtime_checkable
class JointDrafting(Protocol):
    """Drafts of a network that can draft for several sequences in the same passes."""

    def propose_all(
        self, group: Group, plan: DraftPlan, noises: Sequence[GumbelNoise | None], /
    ) -> list[TokenTree | None] | None:
        """Do what `Drafting.propose` does for several sequences, this one's the first.

        Their drafts are of this class, their plan is `DraftPlan.searched`, and their noise is of
        one form, or none. None, and nothing is done, if each of them must draft by itself.
        """


class Step(NamedTuple):
    """Result of one step, passed to `DraftPolicy.observe`.

    Attributes:
        plan: Plan of its drafts; None if nothing was drafted.
        num_nodes: Nodes verified, root included.
        tokens: Accepted drafts and the target's own token after them.
        seconds: Time since the previous outcome; None if the caller kept the decoder waiting.
    """

    plan: DraftPlan | None
    num_nodes: int
    tokens: list[int]
    seconds: float | None


class DraftPolicy(Protocol):
    """Chooses how much every step drafts and verifies; no token depends on it.

    If `choose` returns a plan that `DraftPlan.is_shadow`, the step is a plain one. The proposer
    draws the drafts next to it, and `select` gets them after the outcome, but none are verified.
    """

    @property
    def reads_drafts(self) -> bool:
        """Whether it may read drafts, so that their scores are computed with them."""

    @property
    def least_chance(self) -> float:
        """Probability below which no draft of a lookup can pay; above 1 if none can."""

    def choose(self, matches: Sequence[float] | None) -> DraftPlan | None:
        """Choose the plan of the next step, given `Drafting.matches`; None for plain decoding."""

    def select(self, plan: DraftPlan, tree: TokenTree) -> TokenTree:
        """Return the nodes of a tree to verify, as a tree; the root alone to decode plainly.

        The policy may wait for the drafts; if those are shadow drafts, a wait delays the next step.
        """

    def select_early(self, plan: DraftPlan, tree: TokenTree) -> TokenTree | None:
        """Do what `select` does before the step before is observed; None if that is too early.

        Never waits for the drafts. `select` is not called for the same drafts again.
        """

    def observe(self, step: Step) -> None:
        """Learn from a finished step."""


# Policies that choose, each with the result of `Drafting.matches`.
AllMatches = Sequence[tuple[DraftPolicy, Sequence[float] | None]]


class JointPolicy(Protocol):
    """Decides for all sequences of a batch, whose forward passes have one size."""

    def join(self, policy: DraftPolicy | None) -> DraftPolicy | None:
        """Return the policy of a sequence in the batch for its own one; None to decode plainly."""

    def choose_all(self, found: AllMatches, count: int, seconds: float) -> None:
        """Prepare `DraftPolicy.choose` of the next step of ``count`` sequences.

        The host took ``seconds`` for what it has found.
        """

    def select_all(self, trees: Sequence[tuple[DraftPolicy, TokenTree]]) -> None:
        """Prepare `DraftPolicy.select` of the sequences that have drafts to verify."""
