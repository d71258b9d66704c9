"""The target: a stock mlx-lm model that can also run one forward pass over a token tree.

Axes: N nodes of a tree, V vocabulary, H hidden size.

Only this folder knows the insides of mlx-lm models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, make_prompt_cache

from mlx_redrafter.config import Quantisation
from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.target.caches.batch import BatchCache
from mlx_redrafter.target.caches.full import reserve_rows
from mlx_redrafter.target.caches.kinds import LAYER_CACHES, describe, parts_of
from mlx_redrafter.target.caches.prompt_cache import check_prompt_cache, num_tokens
from mlx_redrafter.target.caches.quantised import QuantisingCache, check_quantisation
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.hooks import TreePositions, captured_output, install, tree_positions
from mlx_redrafter.target.inspection import find_parts
from mlx_redrafter.tree import TokenTree

ProgressCallback = Callable[[int, int], None]


class TargetOutputs(NamedTuple):
    """Outputs of the target for N tokens.

    Attributes:
        logits: Shape (N, V), the model's dtype.
        hidden_states: Backbone outputs after the final norm, which enter the LM head, shape (N, H).
    """

    logits: mx.array
    hidden_states: mx.array


class Target:
    """A stock mlx-lm model, hooked so that it can verify trees; otherwise unchanged.

    Attributes:
        model: The model.
        embedding: The model's input embedding.
        num_layers: Number of its caches.
        hidden_size: Size of a hidden state, H.
        vocab_size: Number of rows of the input embedding, V.
        context_length: Positions the model was made for, or None where its config does not say or
            no layer counts them.

    Raises:
        UnsupportedTargetError: Trees of this architecture would not be decoded exactly.
    """

    def __init__(self, model: nn.Module):
        parts = find_parts(model)
        self.model = model
        self.embedding = parts.embedding
        self.num_layers = parts.num_layers
        self.hidden_size = parts.hidden_size
        self.vocab_size = parts.vocab_size
        self.context_length = parts.context_length
        for point in parts.hooks:
            install(point)

    def new_cache(
        self,
        prompt_cache: Sequence[Any] | None = None,
        quantisation: Quantisation | None = None,
        given: list[Any] | None = None,
    ) -> TreeCache:
        """A cache for one request.

        Args:
            prompt_cache: mlx-lm caches of the layers to go on with; new ones by default.
            quantisation: Quantisation of the rows; None for none.
            given: The caller's list, which begins with those caches: `TreeCache.settle` puts
                quantised ones in their place, as mlx-lm does.

        Raises:
            ConfigError: ``prompt_cache`` was made for another model, or does not hold one text.
            UnsupportedTargetError: A layer's cache is not of the model's own kind, or cannot be
                quantised.
        """
        stock = self.stock_cache(prompt_cache)
        layers = [LAYER_CACHES[type(layer)](layer) for layer in stock]
        length = num_tokens(stock) or 0
        if quantisation is None:
            return TreeCache(layers, length)
        check_quantisation(self.model, quantisation, stock)
        return QuantisingCache(layers, length, quantisation, given)

    def stock_cache(self, prompt_cache: Sequence[Any] | None = None) -> list[Any]:
        """The caller's caches, checked as in `new_cache`, or new ones, as mlx-lm has them."""
        own: list[Any] = make_prompt_cache(self.model)
        if prompt_cache is None:
            return own
        # Never computed: it tells which layers have rows, and of what shape.
        self.model(mx.array([[0]]), cache=own)
        check_prompt_cache(prompt_cache, own)
        return list(prompt_cache)

    def new_batch_cache(self) -> BatchCache:
        """A cache for several texts at once.

        Raises:
            UnsupportedTargetError: A layer does not attend to all tokens.
        """
        others = {describe(layer) for layer in self.stock_cache() if type(layer) is not KVCache}
        if others:
            raise UnsupportedTargetError(
                f"expected a model whose layers attend to all tokens, found one with caches "
                f"{', '.join(sorted(others))}, which has no batches; decode its texts in turn"
            )
        return BatchCache(self.num_layers)

    def blank_cache(self, length: int, quantisation: Quantisation | None = None) -> TreeCache:
        """A cache for timing that holds ``length`` tokens never processed, as rows of zeros.

        `TreeCache.settle` makes it shorter. A state is that after one token, whatever the length.
        Waits for the device.
        """
        cache = self.new_cache(quantisation=quantisation)
        mx.eval(self.advance(mx.array([0], dtype=mx.int32), cache).logits)
        reserve_rows(
            [
                part
                for part in parts_of(cache.stock)
                if isinstance(part, KVCache | ChunkedKVCache | QuantizedKVCache)
            ],
            length,
        )
        cache.settle(length)
        return cache

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of the input embedding: ids of shape (n,) to an array of shape (n, H)."""
        return self.embedding(tokens)

    def prefill(
        self,
        prompt: mx.array,
        cache: TreeCache,
        step_size: int,
        on_progress: ProgressCallback,
    ) -> TargetOutputs:
        """Process the prompt in chunks, the last token alone as mlx-lm does.

        Logits exist for the last token only. Waits for the device once per chunk.

        Args:
            prompt: Token ids, shape (n,), n at least 1.
            cache: Gets the rows of all n tokens.
            step_size: Most tokens per chunk.
            on_progress: Called with the tokens processed and n.

        Returns:
            Outputs of the last token, N = 1, not computed yet.
        """
        total, done = prompt.shape[0], 0
        on_progress(0, total)
        while total - done > 1:
            size = min(step_size, total - done - 1)
            cache.expect(None)
            self.model(prompt[None, done : done + size], cache=cache.stock)
            cache.grow(size)
            mx.eval([layer.state for layer in cache.stock])
            done += size
            on_progress(done, total)
            mx.clear_cache()
        return self.advance(prompt[done:], cache)

    def advance(self, token: mx.array, cache: TreeCache) -> TargetOutputs:
        """Process one token, shape (1,), as plain decoding does."""
        cache.expect(None)
        with captured_output() as outputs:
            logits = self.model(token[None], cache=cache.layers)
        cache.grow(1)
        return TargetOutputs(logits[0], outputs[-1][0])

    def verify(self, tree: TokenTree, cache: TreeCache) -> TargetOutputs:
        """Process all nodes of a tree at once, each seeing its ancestors and all committed tokens.

        Args:
            tree: N nodes; the token of node n sits at position ``cache.length + depths[n]``.
            cache: Gets the nodes' rows; `TreeCache.commit` keeps some of them.

        Returns:
            Outputs of every node.
        """
        cache.expect(tree)
        tokens = mx.maximum(tree.tokens, 0)  # padding nodes are embedded as token 0
        positions = TreePositions(
            (cache.length + tree.depths)[None], cache.length, tree.max_depth + 1
        )
        with captured_output() as outputs, tree_positions(positions):
            logits = self.model(tokens[None], cache=cache.layers)
        return TargetOutputs(logits[0], outputs[-1][0])

    def verify_batch(self, trees: Sequence[TokenTree], cache: BatchCache) -> TargetOutputs:
        """Process the trees of several texts at once, as `verify` does one.

        Args:
            trees: One per slot of the cache, all of N nodes.
            cache: Gets the nodes' rows; `BatchCache.commit` keeps some of them.

        Returns:
            Outputs of the nodes of each slot, shapes (slots, N, V) and (slots, N, H).
        """
        positions = cache.expect(trees)
        with captured_output() as outputs, tree_positions(positions):
            logits = self.model(cache.step.tokens, cache=cache.layers)
        return TargetOutputs(logits, outputs[-1])
