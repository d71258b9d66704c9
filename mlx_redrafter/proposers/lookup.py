"""Drafts out of the text itself: what followed the newest tokens when they stood in it before.

Prompt lookup (arXiv 2304.04487, apoorvumang/prompt-lookup-decoding) with the counts of a suffix
automaton instead of one n-gram. It needs no weights, and works with every target. Texts that copy
from their prompt, such as edits of code and summaries, gain most; others nothing, and lose nothing,
as the host knows before a step whether there is anything to look up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from math import log
from typing import Any

import mlx.nn as nn

from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.proposers.suffix_index import Continuation, Match, SuffixIndex
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import NO_TOKEN, TokenTree

# Shortest suffix that is looked up, in tokens.
LEAST_MATCH = 2
# Lengths of suffixes from which matches are counted together, with the chance that their most
# frequent continuation is right before any is seen.
LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
PRIORS = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
# Weight of those priors, and window of the running means, in tokens.
PRIOR_TOKENS = 4
MEMORY = 64
# Least probability of a draft that is proposed.
LEAST_PROBABILITY = 0.05
# Drafts that `Drafting.outlook` foresees.
OUTLOOK = 16


class MatchRates:
    """How often the most frequent continuation was right, by length of the suffix looked up."""

    def __init__(self) -> None:
        self._rates = list(PRIORS)
        self._counts = [PRIOR_TOKENS] * len(PRIORS)

    def rate(self, length: int) -> float:
        """The share of tokens foreseen after a match of ``length`` tokens, 2 at least."""
        return self._rates[bisect_right(LENGTHS, length) - 1]

    def learn(self, length: int, was_right: bool) -> None:
        """Take in whether the continuation of a match of ``length`` tokens was right."""
        i = bisect_right(LENGTHS, length) - 1
        self._counts[i] = min(self._counts[i] + 1, MEMORY)
        self._rates[i] += (was_right - self._rates[i]) / self._counts[i]


class Lookup:
    """Lookup among the proposers; see `Proposer`.

    Args:
        history: Token ids of earlier texts in which to look as well, indexed when a text begins.

    Attributes:
        rates: Rates of all texts so far.
    """

    num_layers = 0
    num_rows: int | None = None
    max_length: int | None = None
    modules: tuple[nn.Module, ...] = ()

    def __init__(self, history: Sequence[Sequence[int]] = ()):
        self.history: list[Sequence[int]] = [list(tokens) for tokens in history]
        self.rates = MatchRates()

    def after(self, history: Sequence[Sequence[int]]) -> Lookup:
        """This lookup with more texts in which to look, and the same rates."""
        other = copy(self)
        other.history = [*self.history, *history]
        return other

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """See `Proposer.check_fit`; every target fits."""

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> LookupDrafting:
        """See `Proposer.open`."""
        earlier = [token for tokens in self.history for token in (*tokens, NO_TOKEN)]
        return LookupDrafting([*earlier, *prompt], self.rates)


class LookupDrafting:
    """One text's drafts; see `Drafting`.

    The prompt is indexed when something is asked for first, not while a text waits for its turn;
    then tokens wait to be indexed until two in a row stood in the text before, as nothing else
    matches.
    """

    reader = None

    def __init__(self, prompt: Sequence[int], rates: MatchRates):
        self._prompt = prompt
        self._index = SuffixIndex()
        self._waiting = list(prompt)
        self._newest = prompt[-1]
        # What followed the present match, once asked for.
        self._following: list[Continuation] | None = None
        # Tokens of the target that were not read yet.
        self._unread: list[int] = []
        self._rates = rates

    @property
    def index(self) -> SuffixIndex:
        """The text so far."""
        for token in self._waiting:
            self._index.add(token)
        self._waiting.clear()
        return self._index

    @cached_property
    def _pairs(self) -> set[tuple[int, int]]:
        """Tokens in a row, `LEAST_MATCH` of them."""
        return set(pairwise(self._prompt))

    def outlook(self) -> list[float]:
        """See `Drafting.outlook`; the most frequent continuation of the token in flight."""
        self._read()
        found: list[float] = []
        probability, following = 1.0, self._foreseen()
        while following and len(found) < OUTLOOK:
            best = following[0]
            probability *= best.share * self._rates.rate(max(best.match.length - 1, LEAST_MATCH))
            if probability < LEAST_PROBABILITY:
                break
            found.append(probability)
            following = self.index.continuations(best.match, 1)
        return found[1:]  # the first is not a draft but the token in flight

    def propose(
        self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None
    ) -> TokenTree | None:
        """See `Drafting.propose`; waits for the pass."""
        self.skip(flight)
        self._read()
        return self.build_tree(flight.tokens[-1], plan)

    def skip(self, flight: PendingPass) -> None:
        """See `Drafting.skip`; the tokens are read when something is asked for."""
        self._unread += flight.tokens

    def settle(self, length: int) -> None:
        """See `Drafting.settle`; there are no caches."""

    def build_tree(self, root: int, plan: DraftPlan) -> TokenTree | None:
        """The most probable drafts after the text, None where nothing is probable enough."""
        tokens, parents, scores = [root], [0], [0.0]
        waiting: list[tuple[float, int, int, int, int, Match]] = []
        order = 0

        def expand(node: int, depth: int, probability: float, match: Match) -> None:
            nonlocal order
            if depth == plan.shape.levels:
                return
            for token, share, longer in self.index.continuations(match, plan.shape.width):
                rate = self._rates.rate(max(longer.length - 1, LEAST_MATCH))
                likely = probability * share * rate
                if likely >= LEAST_PROBABILITY:
                    order += 1
                    heappush(waiting, (-likely, order, token, node, depth + 1, longer))

        if self.index.match.length >= LEAST_MATCH:
            expand(0, 0, 1.0, self.index.match)
        while waiting and len(tokens) < plan.num_nodes:
            negative, _, token, parent, depth, match = heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            scores.append(log(-negative))
            expand(len(tokens) - 1, depth, -negative, match)
        return None if len(tokens) == 1 else TokenTree.of(tokens, parents, scores[1:])

    def _read(self) -> None:
        """Append tokens of the target, and count which of them were foreseen."""
        unread, self._unread = self._unread, []
        for token in unread:
            following = self._foreseen()
            if following:
                self._rates.learn(self.index.match.length, following[0].token == token)
            pair = self._newest, token
            self._following = None if pair in self._pairs else []
            self._pairs.add(pair)
            self._waiting.append(token)
            self._newest = token

    def _foreseen(self) -> list[Continuation]:
        """The most frequent continuation of the text, if there is one."""
        if self._following is None:
            match = self.index.match
            is_long = match.length >= LEAST_MATCH
            self._following = self.index.continuations(match, 1) if is_long else []
        return self._following
