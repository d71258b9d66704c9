"""Prompt lookup next to a network; the policy chooses one of them for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import Drafting, Proposer, propose_all
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.proposers.lookup.lookup import Lookup, LookupDrafting
from mlx_redrafter.proposers.wrapper import Wrapper
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree


class LookupFirst(Wrapper[Proposer]):
    """Prompt lookup for plans that are ``from_text``, and a network for all others."""

    def __init__(self, lookup: Lookup, network: Proposer):
        super().__init__(network)
        self.lookup = lookup

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> LookupFirstDrafting:
        return LookupFirstDrafting(
            self.lookup.open(target, prompt, couple_noise, []),
            self.proposer.open(target, prompt, couple_noise, cached),
        )


class LookupFirstDrafting:
    """Drafts of one sequence."""

    def __init__(self, lookup: LookupDrafting, network: Drafting):
        self.lookup = lookup
        self.network = network
        self.reader = network.reader

    def matches(self) -> Sequence[float]:
        return self.lookup.matches()

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree | None:
        if plan.from_text:
            tree = self.lookup.propose(flight, plan, noise)
            self.network.skip(flight)
            return tree
        self.lookup.skip(flight)
        return self.network.propose(flight, plan, noise)

    def propose_all(
        self,
        draftings: Sequence[Any],
        flights: Sequence[Pass],
        plan: DraftPlan,
        noises: Sequence[GumbelNoise | None],
    ) -> list[TokenTree | None]:
        if plan.from_text:
            each = zip(draftings, flights, noises, strict=True)
            return [one.propose(flight, plan, noise) for one, flight, noise in each]
        for one, flight in zip(draftings, flights, strict=True):
            one.lookup.skip(flight)
        return propose_all([one.network for one in draftings], flights, plan, noises)

    def skip(self, flight: Pass) -> None:
        self.lookup.skip(flight)
        self.network.skip(flight)

    def trim_to(self, length: int) -> None:
        self.lookup.trim_to(length)
        self.network.trim_to(length)
