"""Masks of the tokens that a grammar allows after every node of a tree.

A grammar may begin at a marker within the text. The marker is a text, as in mlx-lm, since a model
may spell it in several ways. A token may also end beyond the marker if the grammar allows the rest.

Axes: N nodes, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import TextStateMachine

from mlx_redrafter.grammar import LateGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# State of the search for markers: that of mlx-lm's machine for texts.
Search = Any

# Name of the machine's state before a marker. No marker is empty.
FREE = ""


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

        ``on_complete`` does so for a node that completes the grammar, where else the text ends.
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


class TokenBytes:
    """The bytes of llguidance's tokens, as texts of Latin-1, in which a byte is a character."""

    def __init__(self, vocabulary: LLTokenizer):
        tokens = range(vocabulary.vocab_size)
        self.texts = [vocabulary.decode_bytes([token]).decode("latin-1") for token in tokens]
        self.ends = list(vocabulary.eos_tokens)
        self._vocabulary = vocabulary
        self._sorted = sorted((text, token) for token, text in enumerate(self.texts))

    def tokenize(self, text: str) -> list[int]:
        """Return tokens that spell a text; there may be others."""
        return self._vocabulary.tokenize_bytes(text.encode("latin-1"))

    def beyond(self, marker: str) -> list[int]:
        """Return the tokens that begin in a marker, or before it, and end beyond it."""
        found = [
            token
            for token, text in enumerate(self.texts)
            if marker in text and not text.endswith(marker)
        ]
        for i in range(1, len(marker)):
            rest = marker[i:]
            # From behind the rest itself to a character behind all of Latin-1.
            first = bisect_left(self._sorted, (rest, len(self.texts)))
            end = bisect_left(self._sorted, (f"{rest}\u0100", 0))
            found += [token for _, token in self._sorted[first:end]]
        return found


class LateMasks:
    """The masks of a text that is free until a marker comes, with the methods of `GrammarMasks`.

    ``matchers`` stand at the beginning of each marker's grammar.
    """

    def __init__(
        self, grammar: LateGrammar, matchers: Mapping[str, LLMatcher], vocabulary: TokenBytes
    ):
        self._grammar = grammar
        self._matchers = matchers
        self._vocabulary = vocabulary
        edges = [(marker, marker) for marker in matchers]
        no_edges: dict[str, list[tuple[str, str]]] = {marker: [] for marker in matchers}
        self._start: Search = TextStateMachine({FREE: edges, **no_edges}).make_state(FREE)
        self._search = self._start
        self._held: GrammarMasks | None = None
        self._beyond = sorted({token for one in matchers for token in vocabulary.beyond(one)})
        # Masks of free nodes by the beginning of a marker that stands before them.
        self._free_rows: dict[str, bytes | None] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._held is None:
                self._search, self._held = self._read(self._search, token)
                continue
            self._held.extend([token])
            if self._held.is_complete and not self._grammar.is_last:
                self._search, self._held = self._start, None

    def apply(self, logits: mx.array, tokens: Sequence[int], parents: Sequence[int]) -> mx.array:
        nodes = NodeRows(tokens, parents)
        if self._held is None:
            self._walk(nodes, 0, self._search)
        else:
            self._fill(self._held, nodes, 0)
        return nodes.apply(logits)

    def _walk(self, nodes: NodeRows, node: int, search: Search) -> None:
        nodes.rows[node] = self._free_row(search)
        for child in nodes.children[node]:
            if nodes.tokens[child] >= 0:
                after, held = self._read(search, nodes.tokens[child])
                if held is None:
                    self._walk(nodes, child, after)
                else:
                    self._fill(held, nodes, child)

    def _fill(self, held: GrammarMasks, nodes: NodeRows, node: int) -> None:
        if self._grammar.is_last:
            held.fill(nodes, node)
        else:
            held.fill(nodes, node, lambda child: self._walk(nodes, child, self._start))

    def _read(self, search: Search, token: int) -> tuple[Search, GrammarMasks | None]:
        """Read a token of the free text; return the masks of the grammar that it begins."""
        texts = self._vocabulary.texts
        text = texts[token] if token < len(texts) else ""
        after, segments = TextStateMachine.split(search, text)
        marker, rest = segments[-1]
        if marker == FREE:
            return after, None
        held = GrammarMasks(self._matchers[marker].deep_copy)
        held.extend(self._vocabulary.tokenize(rest))
        return after, held

    def _free_row(self, search: Search) -> bytes | None:
        """Return the mask of a free node; most have none."""
        pending = search[3]
        if pending not in self._free_rows:
            forbidden = [] if self._grammar.may_end_before else list(self._vocabulary.ends)
            for token in self._beyond:
                _, segments = TextStateMachine.split(search, self._vocabulary.texts[token])
                marker, rest = segments[-1]
                if marker != FREE:
                    tokens = self._vocabulary.tokenize(rest)
                    if self._matchers[marker].validate_tokens(tokens) < len(tokens):
                        forbidden.append(token)
            self._free_rows[pending] = self._mask_without(forbidden) if forbidden else None
        return self._free_rows[pending]

    def _mask_without(self, forbidden: Sequence[int]) -> bytes:
        # As long as the matchers' masks, which have room for more tokens than there are.
        some = next(iter(self._matchers.values()))
        allowed = np.ones(8 * len(some.compute_bitmask()), dtype=bool)
        allowed[list(forbidden)] = False
        return np.packbits(allowed, bitorder="little").tobytes()


Masks = GrammarMasks | LateMasks
