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


class NodeRows:
    """Packed masks of the nodes of a tree, bits of 32-bit words; None allows all tokens.

    ``children`` has the node indices of the children of each node.
    """

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]):
        self.tokens = tokens
        self.children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            self.children[parents[node]].append(node)
        self.rows: list[bytes | None] = [None] * len(tokens)

    def apply(self, logits: mx.array) -> mx.array:
        """Mask logits of shape (N, V)."""
        given = [row for row in self.rows if row is not None]
        if not given:
            return logits
        everything = b"\xff" * len(given[0])
        packed = b"".join(everything if row is None else row for row in self.rows)
        words = mx.array(np.frombuffer(packed, dtype=np.uint32).reshape(len(self.rows), -1))
        bits = (words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
        # A row without a mask allows the rest of a padded vocabulary, too.
        allowed = bits.reshape(len(self.rows), -1)[:, : logits.shape[-1]] == 1
        return mx.where(allowed, logits, mx.array(-float("inf"), dtype=logits.dtype))


class GrammarMasks:
    """The masks of one grammar: one matcher, which walks down every branch of a tree and back.

    ``new_matcher`` makes one at the beginning of the text. Nothing may follow if it gives up, as
    the text is too complex for its limits, or if a sampler has chosen a token of probability 0.
    """

    def __init__(self, new_matcher: Callable[[], LLMatcher]):
        self._new_matcher = new_matcher
        self._matcher = new_matcher()
        self._text: list[int] = []
        self._nothing = bytes(len(self._matcher.compute_bitmask()))
        self._has_ended = self._has_failed = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing can extend the text."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            if self._has_ended or self._has_failed:
                return
            self._text.append(token)
            if not self._matcher.try_consume_tokens([token]):
                # The decoder cuts the text at its end; nothing may follow a forbidden token.
                self._has_ended = self.is_complete
                self._has_failed = not self._has_ended

    def apply(self, logits: mx.array, tokens: Sequence[int], parents: Sequence[int]) -> mx.array:
        """Set the logits, shape (N, V), of tokens that may not follow a node to minus infinity.

        The root's token is the last of the text, its parent 0. Rows of nodes that cannot be
        accepted stay as they were.
        """
        nodes = NodeRows(tokens, parents)
        self.fill(nodes, 0)
        return nodes.apply(logits)

    def fill(
        self, nodes: NodeRows, root: int, on_complete: Callable[[int], None] | None = None
    ) -> None:
        """Fill in the rows of a node, at which the text ends, and of all nodes below it.

        ``on_complete`` fills in a node which completes the grammar, and all below it. By default
        the text ends there.
        """
        if self._has_failed:
            nodes.rows[root] = self._nothing
        elif not self._has_ended:
            self._walk(nodes, root, [], on_complete)

    def _walk(
        self, nodes: NodeRows, node: int, path: list[int], on_complete: Callable[[int], None] | None
    ) -> None:
        nodes.rows[node] = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            nodes.rows[node] = self._nothing
            return
        for child in nodes.children[node]:
            token = nodes.tokens[child]
            if token >= 0 and self._matcher.try_consume_tokens([token]):
                if on_complete is not None and self.is_complete:
                    on_complete(child)
                else:
                    self._walk(nodes, child, [*path, token], on_complete)
                self._matcher.rollback(1)
            elif self._matcher.is_error():
                nodes.rows[child] = self._nothing
            if self._matcher.is_error():  # it has given up on this branch, not on the others
                self._matcher = self._new_matcher()
                self._matcher.try_consume_tokens([*self._text, *path])
