"""Masks of the tokens that a grammar allows after every node of a tree.

Axes: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarMasks:
    """The masks of one text: one matcher, which walks down every branch of a tree and back.

    Args:
        new_matcher: Function that makes a matcher at the beginning of the text.
    """

    def __init__(self, new_matcher: Callable[[], LLMatcher]):
        self._new_matcher = new_matcher
        self._matcher = new_matcher()
        self._text: list[int] = []
        self._everything = b"\xff" * len(self._matcher.compute_bitmask())
        self._nothing = bytes(len(self._everything))
        # The mask of all further nodes, once the matcher has stopped.
        self._rest: bytes | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            if self._rest is not None:
                return
            self._text.append(token)
            if not self._matcher.try_consume_tokens([token]):
                is_end = self._matcher.is_stopped() and not self._matcher.is_error()
                # The decoder cuts the text at its end; nothing may follow a forbidden token.
                self._rest = self._everything if is_end else self._nothing

    def apply(self, logits: mx.array, tokens: Sequence[int], parents: Sequence[int]) -> mx.array:
        """Set the logits of tokens that may not follow a node to minus infinity.

        Args:
            logits: Shape (N, V).
            tokens: Tokens of the nodes; the root's is the last of the text.
            parents: Node index of each node's parent; the root's is 0.

        Returns:
            Shape (N, V). Rows of nodes that cannot be accepted are as they were. Nothing may follow
            if the matcher gives up, as the text is too complex for its limits, or if a sampler has
            chosen a token of probability 0.
        """
        rows = [self._everything if self._rest is None else self._rest] * len(tokens)
        if self._rest is None:
            children: list[list[int]] = [[] for _ in tokens]
            for node in range(1, len(tokens)):
                children[parents[node]].append(node)
            self._walk(0, tokens, children, rows, [])
        words = mx.array(np.frombuffer(b"".join(rows), dtype=np.uint32).reshape(len(rows), -1))
        bits = (words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
        allowed = bits.reshape(len(rows), -1)[:, : logits.shape[-1]] == 1
        return mx.where(allowed, logits, mx.array(-float("inf"), dtype=logits.dtype))

    def _walk(
        self,
        node: int,
        tokens: Sequence[int],
        children: Sequence[Sequence[int]],
        rows: list[bytes],
        path: list[int],
    ) -> None:
        """Fill in the rows of a node, at the end of ``path``, and of all below it."""
        rows[node] = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            rows[node] = self._nothing
            return
        for child in children[node]:
            token = tokens[child]
            if token >= 0 and self._matcher.try_consume_tokens([token]):
                self._walk(child, tokens, children, rows, [*path, token])
                self._matcher.rollback(1)
            elif self._matcher.is_error():
                rows[child] = self._nothing
            if self._matcher.is_error():  # it has given up on this branch, not on the others
                self._matcher = self._new_matcher()
                self._matcher.try_consume_tokens([*self._text, *path])
