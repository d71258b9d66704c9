"""The most probable drafts after a text, best first, by the product of their chances."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import exp, log
from operator import itemgetter

from mlx_redrafter.decoding.sampling import MIN_FACTOR, GumbelNoise
from mlx_redrafter.device_read import as_rows
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.generation_options import SamplingParams
from mlx_redrafter.proposers.lookup.chances import Chances, Child, match_feature, share_feature
from mlx_redrafter.proposers.lookup.contexts import Contexts, TextEnd
from mlx_redrafter.trees.tree import NO_TOKEN, Drafts, TokenTree

LEAST_PROBABILITY = 0.002


class DraftTree:
    """Drafts after the end of a text; each node is a token, the first one the text's last.

    They are within the bounds of a plan, and have at least the probability ``least``. ``noise`` is
    that of the target's choices after nodes of each depth, if it is to count.
    """

    def __init__(
        self,
        contexts: Contexts,
        chances: Chances,
        plan: DraftPlan,
        noise: GumbelNoise | None,
        least: float,
    ):
        self._contexts, self._chances = contexts, chances
        self._noise = None if noise is None else (noise.params, as_rows(noise.values))
        self._tokens, self._parents, self._scores = [contexts.tokens[-1]], [0], [0.0]
        self._depths, self._ends = [0], [contexts.end]
        self._children = [self._find(contexts.end, 0)]
        self._grow(plan, least)

    @property
    def probabilities(self) -> list[float]:
        """Probabilities of the drafts, the most probable first."""
        return [exp(score) for score in self._scores[1:]]

    @property
    def drafts(self) -> Drafts:
        """The drafts, the most probable first."""
        return Drafts(self._scores[1:], self._depths[1:], self._parents[1:], self._tokens[1:])

    def build(self, root: int) -> TokenTree | None:
        """Build the tree behind a root; other threads may use the contexts. None without drafts."""
        if len(self._tokens) == 1:
            return None
        return TokenTree.of([root, *self._tokens[1:]], self._parents, self._scores[1:])

    def foresee(self, others: Sequence[float]) -> list[float]:
        """Return probabilities of drafts after the next token, the most probable first.

        If that token is no draft of the tree, they are ``others``.
        """
        found = list(zip(self._depths[1:], self.probabilities, strict=True))
        rest = max(1 - sum(chance for depth, chance in found if depth == 1), 0.0)
        later = [chance for depth, chance in found if depth > 1]
        return sorted([*later, *(rest * one for one in others)], reverse=True)

    def learn(self, tokens: Sequence[int]) -> bool:
        """Learn from the tokens that came after the text; return whether all were drafts."""
        edges = zip(self._parents, self._tokens, strict=True)
        below, node = {edge: node for node, edge in enumerate(edges) if node}, 0
        for token in tokens:
            self._chances.learn(self._children[node], token)
            if (node, token) not in below:
                return False
            node = below[node, token]
        return True

    def _grow(self, plan: DraftPlan, least: float) -> None:
        """Add the drafts of at least a probability, the most probable first."""
        waiting: list[tuple[float, int, int]] = []
        for node in range(plan.num_nodes - 1):
            score = self._scores[node]
            least_chance = least / exp(score)
            for rank, child in enumerate(self._children[node][: plan.shape.level_nodes]):
                if child[0] < least_chance:
                    break
                heappush(waiting, (-score - log(child[0]), node, rank))
            if not waiting:
                break
            cost, parent, rank = heappop(waiting)
            token = self._children[parent][rank][1]
            end = self._contexts.after(self._ends[parent], token)
            depth = self._depths[parent] + 1
            self._tokens.append(token)
            self._parents.append(parent)
            self._scores.append(-cost)
            self._depths.append(depth)
            self._ends.append(end)
            self._children.append(self._find(end, depth) if depth < plan.shape.levels else [])

    def _find(self, end: TextEnd, depth: int) -> list[Child]:
        """Return tokens that may follow a node, the most probable first."""
        tokens, rates = self._contexts.tokens, self._chances.rates
        features: dict[int, int] = {}
        for position, length in end.matches:
            features.setdefault(tokens[position], match_feature(length))
        features.pop(NO_TOKEN, None)
        for token, log_share in self._candidates(end.key, depth):
            features[token] = features.get(token, 0) + share_feature(log_share)
        children = [(rates[feature], token, feature) for token, feature in features.items()]
        return sorted(children, key=itemgetter(0), reverse=True)

    def _candidates(self, key: int, depth: int) -> Iterable[tuple[int, float]]:
        """Return candidates and logarithms of their shares, with the target's noise if known."""
        tokens, log_probs = self._contexts.candidates(key)
        if not tokens or self._noise is None:
            return zip(tokens, log_probs, strict=True)
        params, rows = self._noise
        temp, noise = max(params.temp, MIN_FACTOR), memoryview(rows[depth])
        found = zip(log_probs, tokens[: _num_allowed(log_probs, params)], strict=False)
        scores = sorted([(one / temp + noise[token], token) for one, token in found], reverse=True)
        most = scores[0][0]
        total = most + log(sum([exp(score - most) for score, _ in scores]))
        return [(token, score - total) for score, token in scores]


def _num_allowed(log_probs: Sequence[float], params: SamplingParams) -> int:
    """Return the number of candidates that the filters of sampling leave, at least one."""
    count = params.top_k or len(log_probs)
    if params.min_p or params.top_p:
        least, most = log_probs[0] + log(max(params.min_p, MIN_FACTOR)), params.top_p or 1.0
        others = zip(log_probs[1:], accumulate(map(exp, log_probs)), strict=False)
        count = min(count, 1 + sum(one >= least and mass < most for one, mass in others))
    return count
