"""Logits processors of mlx-lm and masks of a grammar, for every node with its own history.

Axes: N nodes, V vocabulary.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_redrafter.decoding.grammar_masks import Masks
from mlx_redrafter.device_read import to_ints
from mlx_redrafter.errors import ConfigError
from mlx_redrafter.trees.tree import NO_TOKEN, TokenTree

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class ProcessorChain:
    """Processors in mlx-lm's form, functions of (tokens so far, logits), and the text so far.

    As in mlx-lm the tokens are the prompt and everything generated, the newest token included.
    Masks of a grammar come last. The host makes them while the device computes the logits.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        prompt: Sequence[int],
        masks: Masks | None = None,
    ):
        self.processors = list(processors)
        self._history = mx.array(list(prompt), dtype=mx.int32)
        self._masks = masks
        self._unread: list[mx.array] = []
        self._has_begun = False

    def process_after(self, drafts: mx.array | TokenTree, logits: mx.array) -> mx.array:
        """Process the logits after the next root, (1, V), or tree, (N, V), of the text."""
        if isinstance(drafts, TokenTree):
            self.extend(drafts.tokens[:1])
            return self.process_tree(logits, drafts)
        if self._has_begun:  # the history has the prompt, whose last token is the first root
            self.extend(drafts)
        self._has_begun = True
        return self._mask(self._run(logits), [NO_TOKEN], [0])

    def extend(self, tokens: mx.array) -> None:
        """Append tokens, int32 of shape (n,), that the target has chosen."""
        if self.processors:
            self._history = mx.concatenate([self._history, tokens])
        if self._masks is not None:
            mx.async_eval(tokens)  # before the logits, so that a read need not wait for both
            self._unread.append(tokens)

    def _run(self, logits: mx.array, drafts: Sequence[int] = ()) -> mx.array:
        """Run the processors on logits of shape (1, V), given the history and then ``drafts``."""
        tokens = self._history
        if drafts:
            tokens = mx.concatenate([tokens, mx.array(list(drafts), dtype=mx.int32)])
        for i, processor in enumerate(self.processors):
            before, logits = logits, processor(tokens, logits)
            if not isinstance(logits, mx.array) or logits.shape != before.shape:
                found = getattr(logits, "shape", type(logits).__name__)
                raise ConfigError(
                    f"logits_processors[{i}] must return logits of shape {before.shape}, as they "
                    f"are given, got {found}"
                )
        return logits

    def process_tree(self, logits: mx.array, tree: TokenTree) -> mx.array:
        """Process the logits, (N, V), of all nodes but padding; reads the tree, so it waits.

        The root is the last token of the history.
        """
        size = logits.shape[0]
        nodes = mx.concatenate([tree.tokens, tree.parents])
        mx.async_eval(nodes)
        mx.async_eval(logits)
        values = to_ints(nodes)
        tokens, parents = values[:size], values[size:]
        if self.processors:
            drafts: list[list[int]] = [[]]
            rows = [self._run(logits[:1])]
            for node in range(1, size):
                drafts.append([*drafts[parents[node]], tokens[node]])
                row = logits[node : node + 1]
                rows.append(row if tokens[node] == NO_TOKEN else self._run(row, drafts[node]))
            logits = mx.concatenate(rows)
        return self._mask(logits, tokens, parents)

    def _mask(self, logits: mx.array, tokens: Sequence[int], parents: Sequence[int]) -> mx.array:
        if self._masks is None:
            return logits
        mx.async_eval(logits)
        for unread in self._unread:
            self._masks.extend(to_ints(unread))
        self._unread.clear()
        return self._masks.apply(logits, tokens, parents)
