"""Logits processors of mlx-lm, applied to every node of a tree with the node's own history.

Axes: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_redrafter.host import to_ints
from mlx_redrafter.tree import NO_TOKEN, TokenTree

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class ProcessorChain:
    """Processors in mlx-lm's form, functions of (tokens so far, logits), and the text so far.

    As in mlx-lm the tokens are the prompt and everything generated, the newest token included.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], prompt: Sequence[int]):
        self.processors = list(processors)
        self._history = mx.array(list(prompt), dtype=mx.int32)

    def extend(self, tokens: mx.array) -> None:
        """Append tokens, int32 of shape (n,), that the target has chosen."""
        self._history = mx.concatenate([self._history, tokens])

    def process(self, logits: mx.array, drafts: Sequence[int] = ()) -> mx.array:
        """Logits of shape (1, V) after all processors, given the history and then ``drafts``."""
        tokens = self._history
        if drafts:
            tokens = mx.concatenate([tokens, mx.array(list(drafts), dtype=mx.int32)])
        for processor in self.processors:
            logits = processor(tokens, logits)
        return logits

    def process_tree(self, logits: mx.array, tree: TokenTree) -> mx.array:
        """Logits of all nodes; padding keeps its own. Reads the tree, so the device is waited for.

        Args:
            logits: Shape (N, V).
            tree: N nodes; the root is the last token of the history.

        Returns:
            Shape (N, V).
        """
        size = logits.shape[0]
        values = to_ints(mx.concatenate([tree.tokens, tree.parents]))
        tokens, parents = values[:size], values[size:]
        drafts: list[list[int]] = [[]]
        rows = [self.process(logits[:1])]
        for node in range(1, size):
            drafts.append([*drafts[parents[node]], tokens[node]])
            row = logits[node : node + 1]
            rows.append(row if tokens[node] == NO_TOKEN else self.process(row, drafts[node]))
        return mx.concatenate(rows)
