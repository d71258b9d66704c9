"""Levels whose probabilities depend on the depth and, by a link, on the draft before.

Axes: R roots, W beams of all of them, D depths, V rows of the head, K candidates of a depth, H
hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from mlx_redrafter.decoding.sampling import top_k
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.search import Expansion, NoiseRank, bounded, log_probs, search_all

# Largest share of a depth's probability that candidates may have; the rest keeps a logarithm.
MAX_SHARE = 1 - 1e-6


class Link(Protocol):
    """Scores of a token that depend on the draft before it, by two tables of rank r."""

    def feature(
        self, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Compute features of beams and their next states, (W, r), or None for a link without.

        ``previous`` are the newest tokens of the beams, int32, shape (W,), and ``hidden`` the
        block's output at the depth, shape (1, H) or (W, H). ``state`` is None at the first depth.
        """

    def scores(self, feature: mx.array, rows: mx.array | None) -> mx.array:
        """Compute what is added to logits, shape (W, V) or (W, K), from features, (W, r).

        ``rows`` of the head are integer, for all beams, shape (1, K), or for each, (W, K); None for
        all V rows.
        """


@dataclass(eq=False)
class LinkedLevels:
    """A `LevelScorer` of logits ``scale_d * (unary_d(t) + link(p, h_d, s)[t])``, or a chain.

    If K candidates of a depth are scored, the other tokens keep their unary logits. So a depth
    whose candidates have little probability is scored low.

    Attributes:
        link: The link; None without one.
        outputs: Outputs of each root's block at the depths, shape (R, D, H).
        unary: Logits before the link, float32, shape (R, D, V).
        roots: Token ids of the roots, integer, shape (R,).
        scales: Factors of the logits, float32, shape (D,); None for 1.
        rank: Ranks with the target's noise, also the candidates: it may favour improbable tokens.
        num_candidates: K; None for all tokens.
        ids_of_rows: Function from rows of the head to token ids, int32.
        confidences: See `BlockNetwork.confidences`; None without such estimates.
    """

    link: Link | None
    outputs: mx.array
    unary: mx.array
    roots: mx.array
    scales: mx.array | None
    rank: NoiseRank | None
    num_candidates: int | None
    ids_of_rows: Callable[[mx.array], mx.array]
    confidences: Callable[[mx.array, mx.array], mx.array] | None = None
    _state: mx.array | None = field(default=None, init=False)
    # Rows of the head, (R, D, K), of the candidates; None for all.
    _candidates: mx.array | None = field(default=None, init=False)
    # Logarithm of the summed exponentials of the other tokens' logits, (R, D, 1).
    _rest: mx.array | None = field(default=None, init=False)
    _depth: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.rank is not None:
            self.confidences = None
        if self.num_candidates is not None and self.num_candidates < self.unary.shape[-1]:
            self._choose_candidates(self.num_candidates)

    def chain(self) -> Expansion:
        """Follow the best draft of every depth from each root, as a search of one beam does.

        MLX computes the probabilities only if something reads them.
        """
        depths = self.unary.shape[1]
        logits, best, tokens, before = [], [], [], [self.roots]
        for depth in range(depths):
            logits.append(self._logits(before[-1], depth))
            best.append(mx.argmax(logits[-1], axis=-1, keepdims=True))
            tokens.append(self.to_token_ids(best[-1]))
            before.append(tokens[-1].squeeze(-1))
        if self.confidences is not None:
            scores = self.confidences(self.outputs, mx.stack(before[:-1], axis=1))
        else:
            joined = _scaled(mx.stack(logits, axis=1), self.scales)
            scores = mx.take_along_axis(joined, mx.stack(best, axis=1), axis=-1)
            scores = scores - _normaliser(joined, self._rest)
        total = mx.cumsum(bounded(scores.squeeze(-1)), axis=-1)
        parents = mx.broadcast_to(mx.arange(-1, depths - 1, dtype=mx.int32), total.shape)
        return Expansion(mx.concatenate(tokens, axis=-1), total, parents)

    def first(self) -> mx.array:
        return self._score(self.roots, 0)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        state, width = self._state, tokens.shape[0]
        if state is not None and beams is not None:
            self._state = state[beams]
        elif state is not None and state.shape[0] != width:
            self._state = mx.broadcast_to(state, (width, state.shape[-1]))
        return self._score(tokens, depth)

    def to_token_ids(self, rows: mx.array) -> mx.array:
        """Return token ids of rows of the head, or of candidates of the newest depth, (R, ...)."""
        if self._candidates is not None:
            rows = mx.take_along_axis(self._candidates[:, self._depth], rows, axis=-1)
        return self.ids_of_rows(rows)

    def _choose_candidates(self, count: int) -> None:
        """Choose the K best tokens of each depth by their logits and noise before the link."""
        roots, depths, size = self.unary.shape
        order = self.unary.reshape(-1, size)
        if self.rank is not None:
            places = mx.tile(mx.arange(depths, dtype=mx.int32), roots)
            order = self.rank(log_probs(order), places)
        chosen = top_k(order, count)[1].astype(mx.int32).reshape(roots, depths, -1)
        total = _normaliser(_scaled(self.unary, self.scales), None)
        self.unary = mx.take_along_axis(self.unary, chosen, axis=-1)
        own = _normaliser(_scaled(self.unary, self.scales), None)
        self._rest = total + _log1m(own - total)
        self._candidates = chosen

    def _score(self, previous: mx.array, depth: int) -> mx.array:
        """Compute log-probabilities of tokens of a depth after others, (W, V) or (W, K), ranked."""
        logits = self._logits(previous, depth)
        if self.scales is not None:
            logits = logits * self.scales[depth]
        rest = None if self._rest is None else self._of_depth(self._rest, depth, previous)
        found = logits - _normaliser(logits, rest)
        if self.confidences is not None:
            best = self.confidences(self._of_depth(self.outputs, depth, previous), previous)
            return _trusted(found, best)
        if self.rank is None:
            return found
        if self._candidates is None:
            return self.rank(found, depth)
        ids = self.ids_of_rows(self._of_depth(self._candidates, depth, previous))
        return self.rank(found, depth, token_ids=ids[0] if ids.shape[0] == 1 else ids)

    def _of_depth(self, values: mx.array, depth: int, previous: mx.array) -> mx.array:
        """Select the rows of a depth: one for all beams, or one for each."""
        rows = values[:, depth]
        roots, count = rows.shape[0], previous.shape[0]
        return rows if roots in (1, count) else mx.repeat(rows, count // roots, axis=0)

    def _logits(self, previous: mx.array, depth: int) -> mx.array:
        """Compute logits, without a scale, of tokens of a depth after others, (W, V) or (W, K)."""
        self._depth = depth
        unary = self._of_depth(self.unary, depth, previous)
        if self.link is None:
            return unary
        rows = None
        if self._candidates is not None:
            rows = self._of_depth(self._candidates, depth, previous)
        outputs = self._of_depth(self.outputs, depth, previous)
        feature, self._state = self.link.feature(previous, outputs, self._state)
        return unary + self.link.scores(feature, rows).astype(mx.float32)


def search_slots(
    logits: mx.array,
    shape: DraftShape,
    rank: NoiseRank | None,
    to_token_ids: Callable[[mx.array], mx.array],
) -> Expansion:
    """Search logits of independent depths, float32, shape (R, D, V), by their best tokens."""
    roots, count = mx.zeros(logits.shape[:1], dtype=mx.int32), shape.level_nodes
    levels = LinkedLevels(None, logits, logits, roots, None, rank, count, to_token_ids)
    return search_all(levels, shape)


def _scaled(logits: mx.array, scales: mx.array | None) -> mx.array:
    """Multiply logits of all depths, (R, D, K), by the factors of the depths."""
    return logits if scales is None else logits * scales[:, None]


def _normaliser(logits: mx.array, rest: mx.array | None) -> mx.array:
    """Compute the logarithm of the summed exponentials of logits, (..., K), and of the others."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    return total if rest is None else mx.logaddexp(total, rest)


def _trusted(found: mx.array, best: mx.array) -> mx.array:
    """Give the best token the estimated probability, and scale those of the others to fit."""
    own = mx.max(found, axis=-1, keepdims=True)
    others = found + _log1m(best) - _log1m(own)
    # The order of the tokens stays, also if the estimate is low.
    return mx.where(found == own, best, mx.minimum(others, best + found - own))


def _log1m(log_prob: mx.array) -> mx.array:
    """Compute ``log(1 - exp(x))`` of log-probabilities up to about 1 - 1e-6."""
    return mx.log1p(-mx.minimum(mx.exp(log_prob), MAX_SHARE))
