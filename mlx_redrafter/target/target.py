"""The target: a stock mlx-lm model that can also run one forward pass over a token tree.

Axes: N nodes of a tree, V vocabulary, H hidden size.

Only this folder knows the insides of mlx-lm models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, make_prompt_cache

from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.target.caches.batch_cache import BatchCache
from mlx_redrafter.target.caches.cache_kinds import LAYER_CACHES, describe, parts_of
from mlx_redrafter.target.caches.full import reserve_rows
from mlx_redrafter.target.caches.prompt_cache import check_prompt_cache, num_tokens
from mlx_redrafter.target.caches.quantised import QuantisingCache, check_quantisation
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.hooks import (
    HookPoint,
    TreePositions,
    capture_input,
    captured_inputs,
    captured_output,
    install,
    replaced_output,
    tree_positions,
)
from mlx_redrafter.target.inspection import find_parts
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch

ProgressCallback = Callable[[int, int], None]
StatesCallback = Callable[[mx.array], None]

# Stands for the last layer's output after the final norm, among layers whose inputs are asked for.
FINAL = -1


class TargetOutputs(NamedTuple):
    """Outputs of the target for N tokens.

    Attributes:
        logits: Shape (N, V), the model's dtype.
        hidden_states: Backbone outputs after the final norm, which enter the LM head, shape (N, H).
        states: Inputs of the layers that were asked for, beside each other, shape (N, S); None
            where none were.
    """

    logits: mx.array
    hidden_states: mx.array
    states: mx.array | None = None

    def first(self, count: int) -> TargetOutputs:
        """The outputs for the first tokens."""
        states = None if self.states is None else self.states[:count]
        return TargetOutputs(self.logits[:count], self.hidden_states[:count], states)

    @property
    def alone(self) -> TargetOutputs:
        """The outputs for the only text, of arrays with an axis of texts."""
        # Not by an index, which the device would look up.
        states = None if self.states is None else self.states.squeeze(0)
        return TargetOutputs(self.logits.squeeze(0), self.hidden_states.squeeze(0), states)

    def of(self, texts: int | mx.array) -> TargetOutputs:
        """The outputs for one of several texts, or for some, of arrays with an axis of texts."""
        states = None if self.states is None else self.states[texts]
        return TargetOutputs(self.logits[texts], self.hidden_states[texts], states)


class Target:
    """A stock mlx-lm model, hooked so that it can verify trees; otherwise unchanged.

    Attributes:
        model: The model.
        embedding: The model's input embedding.
        blocks: The model's layers, in order.
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
        self._backbone: Any = parts.hooks[0].owner
        self.blocks: list[nn.Module] = list(model.layers)
        self.num_layers = parts.num_layers
        self.hidden_size = parts.hidden_size
        self.vocab_size = parts.vocab_size
        self.context_length = parts.context_length
        for point in parts.hooks:
            install(point)

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the rows of the input embedding."""
        return self.embed(mx.zeros((1,), dtype=mx.int32)).dtype

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

    def logits(self, hidden_states: mx.array) -> mx.array:
        """What the LM head makes of `TargetOutputs.hidden_states`, shape (n, H) to (n, V)."""
        # Whatever comes before the head is built at most, and never computed.
        tokens = mx.zeros((1, hidden_states.shape[0]), dtype=mx.int32)
        # In another dtype than the head's all its weights would be cast.
        states = hidden_states[None].astype(self.dtype)
        with replaced_output(states):
            logits: mx.array = self.model(tokens)
        return logits[0]

    def normalise(self, states: mx.array) -> mx.array:
        """What the final norm makes of the last layer's output, shape (n, H) to the same.

        The first use waits for the device.

        Raises:
            UnsupportedTargetError: What enters the LM head is not the output of a norm.
        """
        normalised: mx.array = self._final_norm(states.astype(self.dtype))
        return normalised

    def prefill(
        self,
        prompt: mx.array,
        cache: TreeCache,
        step_size: int,
        on_progress: ProgressCallback,
        layers: Sequence[int] = (),
        on_states: StatesCallback = lambda states: None,
    ) -> TargetOutputs:
        """Process the prompt, the last token alone as mlx-lm does.

        Args:
            prompt: Token ids, shape (n,), n at least 1.
            cache: Gets the rows of all n tokens.
            step_size: As in `prefill_but_last`.
            on_progress: As in `prefill_but_last`.
            layers: As in `verify`.
            on_states: As in `prefill_but_last`.

        Returns:
            Outputs of the last token, N = 1, not computed yet.
        """
        self.prefill_but_last(prompt, cache, step_size, on_progress, layers, on_states)
        return self.advance(prompt[-1:], cache, layers)

    def prefill_but_last(
        self,
        prompt: mx.array,
        cache: TreeCache,
        step_size: int,
        on_progress: ProgressCallback,
        layers: Sequence[int] = (),
        on_states: StatesCallback = lambda states: None,
    ) -> None:
        """Process the prompt in chunks, all but its last token, without logits.

        Waits for the device once per chunk.

        Args:
            prompt: Token ids, shape (n,), n at least 1.
            cache: Gets the rows of n - 1 tokens.
            step_size: Most tokens per chunk.
            on_progress: Called with the tokens processed and n.
            layers: As in `verify`.
            on_states: Called with the states of every chunk, not computed yet, if there are layers.
        """
        total, done = prompt.shape[0], 0
        on_progress(0, total)
        while total - done > 1:
            size = min(step_size, total - done - 1)
            cache.expect(None)
            chunk = prompt[done : done + size]
            if layers:
                states = self._process(chunk[None], cache.stock, layers).alone.states
                assert states is not None
                on_states(states)
            else:
                self.model(chunk[None], cache=cache.stock)
            cache.grow(size)
            mx.eval([layer.state for layer in cache.stock])
            done += size
            on_progress(done, total)
            mx.clear_cache()

    def advance(
        self, token: mx.array, cache: TreeCache, layers: Sequence[int] = ()
    ) -> TargetOutputs:
        """Process one token, shape (1,), as plain decoding does; ``layers`` as in `verify`."""
        cache.expect(None)
        outputs = self._process(token[None], cache.layers, layers).alone
        cache.grow(1)
        return outputs

    def verify(
        self, tree: TokenTree, cache: TreeCache, layers: Sequence[int] = ()
    ) -> TargetOutputs:
        """Process all nodes of a tree at once, each seeing its ancestors and all committed tokens.

        Args:
            tree: N nodes; the token of node n sits at position ``cache.length + depths[n]``.
            cache: Gets the nodes' rows; `TreeCache.commit` keeps some of them.
            layers: Layers whose inputs are wanted, which are watched, and `FINAL`.

        Returns:
            Outputs of every node.
        """
        cache.expect(tree)
        tokens = tree.tokens
        if tree.num_nodes < tree.size:
            tokens = mx.maximum(tokens, 0)  # padding nodes are embedded as token 0
        nodes = (cache.length + tree.depths)[None]
        with tree_positions(TreePositions(nodes, cache.length, tree.max_depth + 1)):
            return self._process(tokens[None], cache.layers, layers).alone

    def verify_batch(
        self, forest: TreeBatch, cache: BatchCache, layers: Sequence[int] = ()
    ) -> TargetOutputs:
        """Process the trees of several texts at once, as `verify` does one.

        Args:
            forest: One tree per slot of the cache.
            cache: Gets the nodes' rows; `BatchCache.commit` keeps some of them.
            layers: As in `verify`.

        Returns:
            Outputs of every node, each array with an axis of slots before its others.
        """
        step = cache.expect(forest)
        with tree_positions(step.positions):
            return self._process(step.tokens, cache.layers, layers)

    def layer_inputs(self, tokens: mx.array, layers: Sequence[int]) -> mx.array:
        """Inputs of layers at all tokens of a new text, of shape (n,), in one pass.

        Args:
            tokens: Token ids, shape (n,).
            layers: As in `verify`, at least one.

        Returns:
            The inputs beside each other, shape (n, S).
        """
        states = self._process(tokens[None], None, layers).alone.states
        assert states is not None
        return states

    def watch(self, layers: Sequence[int]) -> None:
        """Hook layers, so that passes can tell what they are given; computes nothing.

        Args:
            layers: As in `verify`.

        Raises:
            UnsupportedTargetError: There is no such layer, or its input is not one row per token.
        """
        for layer in layers:
            if layer == FINAL:
                continue
            if not 0 <= layer < len(self.blocks):
                raise UnsupportedTargetError(
                    f"expected layers 0 to {len(self.blocks) - 1} of the target to draft from, "
                    f"found {layer}; use a drafter trained for this model"
                )
            install(HookPoint(self.blocks[layer], "__call__", capture_input))
        states = self._process(mx.array([[0]]), None, layers).alone.states
        if states is None or states.shape != (1, self.hidden_size * len(layers)):
            raise UnsupportedTargetError(
                f"expected layers {list(layers)} of the target to take rows of {self.hidden_size} "
                "numbers, found others; use a recurrent drafter for this model"
            )

    def _process(
        self, tokens: mx.array, caches: list[Any] | None, layers: Sequence[int]
    ) -> TargetOutputs:
        """Outputs for tokens of one or several texts, shape (texts, N), with an axis of texts."""
        with captured_output() as outputs, captured_inputs() as inputs:
            logits = self.model(tokens, cache=caches)
        final, states = outputs[-1], None
        if layers:
            parts = [final if i == FINAL else inputs[id(self.blocks[i])] for i in layers]
            states = mx.concatenate(parts, axis=-1)
        return TargetOutputs(logits, final, states)

    @cached_property
    def _final_norm(self) -> Any:
        """Of the backbone's parts, the norm whose output is the backbone's."""
        modules = [self._backbone, *self._backbone.children().values()]
        candidates = [one for one in modules if _is_norm(one, self.hidden_size)]
        for module in candidates:
            install(HookPoint(module, "__call__", capture_input))
        with captured_output() as outputs, captured_inputs() as inputs:
            self.model(mx.array([[0]]))
        for module in candidates:
            given = inputs.get(id(module))
            if given is not None and mx.array_equal(module(given), outputs[-1]).item():
                return module
        raise UnsupportedTargetError(
            "expected a model whose LM head is given the output of a norm, found another; use "
            "another kind of drafter for it"
        )


def _is_norm(module: Any, hidden_size: int) -> bool:
    weight = module.get("weight") if isinstance(module, nn.Module) else None
    return weight is not None and weight.shape == (hidden_size,)
