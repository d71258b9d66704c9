"""Prompt lookup: drafts are the tokens that followed the newest ones earlier in the context.

Sources: arXiv 2304.04487 and apoorvumang/prompt-lookup-decoding, here with the counts of a suffix
automaton instead of one n-gram. It needs no weights, and works with every target. Sequences that
copy from their prompt, such as edits of code and summaries, gain most. Others gain nothing and lose
nothing, as the host knows before a step whether the context holds a match.
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

from mlx_redrafter.checks import check_instance, check_vocabulary, token_ids
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.proposers.lookup.suffix_index import Continuation, Match, SuffixIndex
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import NO_TOKEN, TokenTree

# Length of the shortest suffix to look up, in tokens.
LEAST_MATCH = 2
# Shortest match of each group whose rates are counted together, in tokens.
LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# Chance that the most frequent continuation is right, by group, before any is counted.
PRIORS = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
# Weight of those priors, in tokens.
PRIOR_TOKENS = 4
# Window of the running means, in tokens.
MEMORY = 64
# Minimum probability of a draft.
LEAST_PROBABILITY = 0.05
# Maximum number of drafts in `Drafting.outlook`.
OUTLOOK = 16


class MatchRates:
    """Rates at which the most frequent continuation was right, by length of the match."""

    def __init__(self) -> None:
        self._rates = list(PRIORS)
        self._counts = [PRIOR_TOKENS] * len(PRIORS)

    def rate(self, length: int) -> float:
        """Return the share of right continuations after a match of ``length`` >= 2 tokens."""
        return self._rates[bisect_right(LENGTHS, length) - 1]

    def learn(self, length: int, was_right: bool) -> None:
        """Count whether the continuation of a match of ``length`` tokens was right."""
        i = bisect_right(LENGTHS, length) - 1
        self._counts[i] = min(self._counts[i] + 1, MEMORY)
        self._rates[i] += (was_right - self._rates[i]) / self._counts[i]


class Lookup:
    """Prompt lookup, as `Proposer`.

    Args:
        history: Token ids of earlier requests to look in as well; a sequence indexes them when it
            begins.
    """

    num_layers = 0
    num_rows: int | None = None
    max_length: int | None = None
    networks: tuple[nn.Module, ...] = ()

    def __init__(self, history: Sequence[Sequence[int]] = ()):
        check_instance("history", history, (list, tuple), "a list of texts' token ids")
        self.history = [token_ids("history[...]", tokens) for tokens in history]
        self.rates = MatchRates()

    def after(self, history: Sequence[Sequence[int]]) -> Lookup:
        """Return a lookup in more earlier requests that shares the rates of this one."""
        other = copy(self)
        other.history = [*self.history, *Lookup(history).history]
        return other

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """Raise `ConfigError` unless the target has all tokens of the history."""
        for tokens in self.history:
            check_vocabulary("history token ids", tokens, target.vocab_size)

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> LookupDrafting:
        earlier = [token for tokens in self.history for token in (*tokens, NO_TOKEN)]
        return LookupDrafting([*earlier, *prompt], self.rates)


class LookupDrafting:
    """Drafts of one sequence.

    The first call of a method indexes the prompt, not the constructor, so that sequences that wait
    for their turn cost nothing. New tokens wait until two in a row have occurred before, as nothing
    else can match.
    """

    reader = None

    def __init__(self, prompt: Sequence[int], rates: MatchRates):
        self._prompt = prompt
        self._index = SuffixIndex()
        self._waiting = list(prompt)
        self._newest = prompt[-1]
        # Continuation of the present match, once it is known.
        self._following: list[Continuation] | None = None
        # The newest pass, until the next call reads its tokens: the host has waited for it by then.
        self._flight: Pass | None = None
        self._rates = rates

    @property
    def index(self) -> SuffixIndex:
        for token in self._waiting:
            self._index.add(token)
        self._waiting.clear()
        return self._index

    @cached_property
    def _pairs(self) -> set[tuple[int, int]]:
        """Pairs of neighbouring tokens, of `LEAST_MATCH` each."""
        return set(pairwise(self._prompt))

    def outlook(self) -> list[float]:
        """Return probabilities of the most frequent continuation after the token in flight."""
        self._read()
        found: list[float] = []
        probability, following, index = 1.0, self._foreseen(), self.index
        while following and len(found) < OUTLOOK:
            best = following[0]
            probability *= best.share * self._rates.rate(max(best.match.length - 1, LEAST_MATCH))
            if probability < LEAST_PROBABILITY:
                break
            found.append(probability)
            following = index.continuations(best.match, 1)
        return found[1:]  # the first is not a draft but the token in flight

    def propose(self, flight: Pass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree | None:
        """Propose after a pass, which the host waits for."""
        self.skip(flight)
        self._read()
        return self.build_tree(flight.tokens[-1], plan)

    def skip(self, flight: Pass) -> None:
        """Keep the pass for the next call; the host does not wait for it."""
        self._read()
        self._flight = flight

    def settle(self, length: int) -> None:
        """Leave everything, as there are no caches."""

    def build_tree(self, root: int, plan: DraftPlan) -> TokenTree | None:
        """Build the tree of the most probable drafts; None if nothing is probable enough."""
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
        """Append the tokens of the newest pass, and count the continuations that were right."""
        flight, self._flight = self._flight, None
        for token in flight.tokens if flight else ():
            following = self._foreseen()
            if following:
                self._rates.learn(self.index.match.length, following[0].token == token)
            pair = self._newest, token
            self._following = None if pair in self._pairs else []
            self._pairs.add(pair)
            self._waiting.append(token)
            self._newest = token

    def _foreseen(self) -> list[Continuation]:
        """Return the most frequent continuation of the sequence, if there is one."""
        if self._following is None:
            match = self.index.match
            is_long = match.length >= LEAST_MATCH
            self._following = self.index.continuations(match, 1) if is_long else []
        return self._following
