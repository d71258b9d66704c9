"""Levels of a block with a link, whose probabilities depend on the depth and on the draft before.

Axes: W beams, D depths, V rows of the head, K candidates of a depth, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlx_redrafter.proposers.block.links import Link
from mlx_redrafter.proposers.scores import NoiseRank, log_probs
from mlx_redrafter.trees.topk import top_k

# Largest share of a depth's probability that candidates may have; the rest keeps a logarithm.
MAX_SHARE = 1 - 1e-6


class LinkedLevels:
    """A `LevelScorer` of logits ``scale_d * (unary_d(t) + link(p, h_d, s)[t])``.

    If K candidates of a depth are scored, the other tokens keep their unary logits. So a depth
    whose candidates have little probability is scored low.

    Args:
        link: The link.
        outputs: Outputs of the block at the depths, shape (D, H).
        unary: Logits before the link, float32, shape (D, V).
        root: Token id of the root, integer, shape (1,).
        scales: Factors of the logits, float32, shape (D,).
        rank: Function that ranks with the target's noise, or None. It also chooses the candidates,
            as the noise may favour improbable tokens.
        num_candidates: K; None for all tokens.
        to_token_ids: Function from rows of the head to token ids, int32.
        confidences: Function from the output of a depth, shape (1, H), and the tokens before, shape
            (W,), to log-probabilities that the best drafts are accepted, shape (W, 1); None without
            such estimates.
    """

    def __init__(
        self,
        link: Link,
        outputs: mx.array,
        unary: mx.array,
        root: mx.array,
        scales: mx.array,
        rank: NoiseRank | None,
        num_candidates: int | None,
        to_token_ids: Callable[[mx.array], mx.array],
        confidences: Callable[[mx.array, mx.array], mx.array] | None = None,
    ):
        self.link, self.outputs, self.root = link, outputs, root
        self.scales, self.rank = scales[:, None], rank
        self.unary = unary * self.scales
        self.confidences = confidences
        self._to_token_ids = to_token_ids
        self._state: mx.array | None = None
        self.num_rows = min(num_candidates or unary.shape[-1], unary.shape[-1])
        # Rows of the head, (D, K), of the candidates; None for all.
        self._candidates: mx.array | None = None
        # Logarithm of the summed exponentials of the other tokens' logits, (D, 1).
        self._rest: mx.array | None = None
        self._depth = 0
        if self.num_rows < unary.shape[-1]:
            self._choose_candidates()

    def first(self) -> mx.array:
        return self._score(self.root, 0)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        state, width = self._state, tokens.shape[0]
        if state is not None and beams is not None:
            self._state = state[beams]
        elif state is not None and state.shape[0] != width:
            self._state = mx.broadcast_to(state, (width, state.shape[-1]))
        return self._score(tokens, depth)

    def to_token_ids(self, rows: mx.array) -> mx.array:
        """Return token ids of rows of the head, or of candidates of the newest depth."""
        if self._candidates is not None:
            rows = self._candidates[self._depth][rows]
        return self._to_token_ids(rows)

    def _choose_candidates(self) -> None:
        """Choose the K best tokens of each depth by their logits and noise before the link."""
        order = self.unary
        if self.rank is not None:
            order = self.rank(log_probs(order), mx.arange(order.shape[0], dtype=mx.int32))
        chosen = top_k(order, self.num_rows).indices.astype(mx.int32)
        total = mx.logsumexp(self.unary, axis=-1, keepdims=True)
        self.unary = mx.take_along_axis(self.unary, chosen, axis=-1)
        share = mx.exp(mx.logsumexp(self.unary, axis=-1, keepdims=True) - total)
        self._rest = total + mx.log1p(-mx.minimum(share, MAX_SHARE))
        self._candidates = chosen

    def _score(self, previous: mx.array, depth: int) -> mx.array:
        """Compute log-probabilities of tokens of a depth after others, (W, V) or (W, K)."""
        self._depth = depth
        row = slice(depth, depth + 1)
        rows = None if self._candidates is None else self._candidates[depth]
        feature, self._state = self.link.feature(previous, self.outputs[row], self._state)
        linked = self.link.scores(feature, rows).astype(mx.float32)
        logits = self.unary[row] + self.scales[row] * linked
        normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
        if self._rest is not None:
            normaliser = mx.logaddexp(normaliser, self._rest[row])
        found = logits - normaliser
        if self.rank is None:
            return found if self.confidences is None else self._trusted(found, previous, row)
        if rows is None:
            return self.rank(found, depth)
        return self.rank(found, depth, token_ids=self._to_token_ids(rows))

    def _trusted(self, found: mx.array, previous: mx.array, row: slice) -> mx.array:
        """Give the best token the estimated probability, and scale those of the others to fit."""
        assert self.confidences is not None
        best = self.confidences(self.outputs[row], previous)
        own = mx.max(found, axis=-1, keepdims=True)
        others = found + _log1m(best) - _log1m(own)
        # The order of the tokens stays, also if the estimate is low.
        return mx.where(found == own, best, mx.minimum(others, best + found - own))


def _log1m(log_prob: mx.array) -> mx.array:
    """Compute ``log(1 - exp(x))`` of log-probabilities up to about 1 - 1e-6."""
    return mx.log1p(-mx.minimum(mx.exp(log_prob), MAX_SHARE))
