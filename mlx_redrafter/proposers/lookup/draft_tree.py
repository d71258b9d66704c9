"""The most probable drafts after a text, best first, by the product of their chances."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from math import exp, log
from operator import itemgetter

from mlx_redrafter.decoding.sampling import MIN_FACTOR, GumbelNoise
from mlx_redrafter.device_read import as_rows, entries
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.proposers.lookup.chances import (
    BOUNDS,
    Chances,
    Child,
    features_of,
    group_of_match,
)
from mlx_redrafter.proposers.lookup.contexts import Contexts, Place
from mlx_redrafter.trees.tree import NO_TOKEN, TokenTree

# Minimum probability of a draft.
LEAST_PROBABILITY = 0.002


class DraftTree:
    """Drafts after the end of a text; each node is a token, the first one the text's last.

    Args:
        contexts: Contexts of the text.
        chances: Chances of drafts.
        noise: Noise of the target's choices after nodes of each depth; None without noise.
    """

    def __init__(self, contexts: Contexts, chances: Chances, noise: GumbelNoise | None = None):
        self._contexts = contexts
        self._chances = chances
        self._params = None if noise is None else noise.params
        self._noise = None if noise is None else as_rows(noise.values)
        self._tokens, self._parents, self._scores = [contexts.tokens[-1]], [0], [0.0]
        self._places, self._depths = [contexts.end], [0]
        # Children of each node, the most probable first; None until they are needed.
        self._children: list[list[Child] | None] = [None]

    @property
    def probabilities(self) -> list[float]:
        """Probabilities of the drafts, the most probable first."""
        return [exp(score) for score in self._scores[1:]]

    def grow(self, plan: DraftPlan, least: float = LEAST_PROBABILITY) -> TokenTree | None:
        """Build the tree of the most probable drafts; None if nothing is probable enough.

        Args:
            plan: Bounds of the tree.
            least: Minimum probability of a draft.
        """
        least_score = log(least)
        waiting: list[tuple[float, int, int]] = []
        most, levels = plan.shape.level_nodes, plan.shape.levels

        def offer(node: int, rank: int) -> None:
            """Let the child of a node compete: its best one, then the next best."""
            children = self.children(node)
            if rank < min(len(children), most):
                score = self._scores[node] + log(children[rank][0])
                if score >= least_score:
                    heappush(waiting, (-score, node, rank))

        offer(0, 0)
        while waiting and len(self._tokens) < plan.num_nodes:
            score, parent, rank = heappop(waiting)
            node = self._add(parent, self.children(parent)[rank][1], -score)
            offer(parent, rank + 1)
            if self._depths[node] < levels:
                offer(node, 0)
        if len(self._tokens) == 1:
            return None
        return TokenTree.of(self._tokens, self._parents, self._scores[1:])

    def foresee(self, others: Sequence[float]) -> list[float]:
        """Return probabilities of drafts after the next token, the most probable first.

        Args:
            others: Probabilities of drafts after a next token that is no draft of the tree.
        """
        first, later = 0.0, list[float]()
        for depth, score in zip(self._depths, self._scores, strict=True):
            if depth == 1:
                first += exp(score)
            elif depth > 1:
                later.append(exp(score))
        return sorted(later + [max(1 - first, 0.0) * one for one in others], reverse=True)

    def learn(self, tokens: Sequence[int]) -> bool:
        """Learn from the tokens that came after the text; return whether all were drafts."""
        node: int | None = 0
        below = {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(self._parents, self._tokens, strict=True))
            if node
        }
        for token in tokens:
            if node is None:
                return False
            self._chances.learn(self._children[node] or (), token)
            node = below.get((node, token))
        return node is not None

    def children(self, node: int) -> list[Child]:
        """Return tokens that may follow a node, the most probable first."""
        if self._children[node] is None:
            self._children[node] = self._find(self._places[node], self._depths[node])
        return self._children[node] or []

    def _add(self, parent: int, token: int, score: float) -> int:
        self._tokens.append(token)
        self._parents.append(parent)
        self._scores.append(score)
        self._places.append(self._contexts.after(self._places[parent], token))
        self._depths.append(self._depths[parent] + 1)
        self._children.append(None)
        return len(self._tokens) - 1

    def _find(self, place: Place, depth: int) -> list[Child]:
        tokens, rates = self._contexts.tokens, self._chances.rates
        matches: dict[int, int] = {}
        for position, length in place.matches:
            token = tokens[position]
            if token not in matches and token != NO_TOKEN:
                matches[token] = group_of_match(length)
        children: list[Child] = []
        found = self._contexts.candidates(place.key)
        if found is not None:
            order, drafts, log_shares = found
            has_noise = self._noise is not None and depth < len(self._noise)
            if has_noise:
                drafts, log_shares = self._add_noise(drafts, log_shares, depth)
            first = features_of(0, order, has_noise)
            for token, log_share in zip(drafts, log_shares, strict=True):
                feature = bisect_left(BOUNDS, -log_share)
                match = matches.pop(token, 0)
                feature += features_of(match, order, has_noise) if match else first
                children.append((rates[feature], token, feature))
        for rank, (token, match) in enumerate(matches.items()):
            feature = features_of(match, 0, False) + rank
            children.append((rates[feature], token, feature))
        children.sort(key=itemgetter(0), reverse=True)
        return children

    def _add_noise(
        self, tokens: Sequence[int], log_probs: Sequence[float], depth: int
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Return candidates and logarithms of their shares with the target's noise, best first."""
        assert self._params is not None
        assert self._noise is not None
        temp, allowed = max(self._params.temp, MIN_FACTOR), _num_allowed(log_probs, self._params)
        noise = entries(self._noise, depth, tokens[:allowed])
        scores = [
            (log_prob / temp + added, token)
            for token, log_prob, added in zip(tokens, log_probs, noise, strict=False)
        ]
        scores.sort(reverse=True)
        most = scores[0][0]
        total = most + log(sum([exp(score - most) for score, _ in scores]))
        return [token for _, token in scores], [score - total for score, _ in scores]


def _num_allowed(log_probs: Sequence[float], params: SamplingParams) -> int:
    """Return the number of candidates that the filters of sampling leave, at least one."""
    mass, least = 0.0, log(max(params.min_p, MIN_FACTOR)) + log_probs[0]
    for number, log_prob in enumerate(log_probs):
        is_over = number and (mass >= (params.top_p or 1.0) or number == params.top_k)
        if is_over or log_prob < least:
            return number
        mass += exp(log_prob)
    return len(log_probs)
