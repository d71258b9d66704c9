"""A lookup in the text in front of a network: whichever the policy expects more of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn

from mlx_redrafter.decoding.protocols import Drafting, Proposer
from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.proposers.lookup import Lookup, LookupDrafting
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

# Looks in a row that nothing was drafted by, after which only one step in so many looks, unless
# looking takes less than that share of the time.
IN_VAIN, SELDOM, LITTLE = 32, 4, 0.01


class LookupFirst:
    """Both among the proposers; see `Proposer`.

    Args:
        lookup: Drafts where a plan is ``from_text``.
        network: Drafts for all other plans.
    """

    def __init__(self, lookup: Lookup, network: Proposer):
        self.lookup = lookup
        self.network = network

    @property
    def num_layers(self) -> int:
        """See `Proposer.num_layers`."""
        return self.network.num_layers

    @property
    def num_rows(self) -> int | None:
        """See `Proposer.num_rows`."""
        return self.network.num_rows

    @property
    def max_length(self) -> int | None:
        """See `Proposer.max_length`."""
        return self.network.max_length

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """See `Proposer.modules`."""
        return self.network.modules

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """See `Proposer.check_fit`."""
        self.network.check_fit(target, tokenizer)

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> LookupFirstDrafting:
        """See `Proposer.open`."""
        return LookupFirstDrafting(
            self.lookup.open(target, prompt, couple_noise, []),
            self.network.open(target, prompt, couple_noise, cached),
        )


class LookupFirstDrafting:
    """One text's drafts; see `Drafting`.

    Args:
        lookup: Drafts where a plan is ``from_text``.
        network: Drafts for all other plans.
        clock: Seconds so far.
    """

    def __init__(
        self,
        lookup: LookupDrafting,
        network: Drafting,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.lookup = lookup
        self.network = network
        self.reader = network.reader
        self._clock = clock
        # When the first look ended, which indexes the prompt, and seconds of looking since.
        self._start: float | None = None
        self._looking = 0.0
        # Looks since drafts were looked up, and steps since the last look.
        self._in_vain = self._waited = 0
        # A pass that the lookup does not know yet, as the host had not read it.
        self._unseen: PendingPass | None = None

    def outlook(self) -> Sequence[float]:
        """See `Drafting.outlook`; the lookup's alone, and now and then where that is of no use."""
        self._waited += 1
        begin = self._clock()
        if self._in_vain >= IN_VAIN and self._waited < SELDOM and self._takes_time(begin):
            return ()
        self._in_vain, self._waited = self._in_vain + 1, 0
        self._show_lookup()
        outlook, end = self.lookup.outlook(), self._clock()
        if self._start is None:
            self._start = end
        else:
            self._looking += end - begin
        return outlook

    def propose(
        self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None
    ) -> TokenTree | None:
        """See `Drafting.propose`."""
        self._show_lookup()
        if plan.from_text:
            self._in_vain = 0
            tree = self.lookup.propose(flight, plan, noise)
            self.network.skip(flight)
            return tree
        self._unseen = flight
        return self.network.propose(flight, plan, noise)

    def skip(self, flight: PendingPass) -> None:
        """See `Drafting.skip`."""
        self._show_lookup()
        self.lookup.skip(flight)
        self.network.skip(flight)

    def settle(self, length: int) -> None:
        """See `Drafting.settle`."""
        self.network.settle(length)

    def _takes_time(self, now: float) -> bool:
        """Whether looking has taken a share of the time that short steps notice."""
        return self._start is not None and self._looking > LITTLE * (now - self._start)

    def _show_lookup(self) -> None:
        unseen, self._unseen = self._unseen, None
        if unseen is not None:
            self.lookup.skip(unseen)
