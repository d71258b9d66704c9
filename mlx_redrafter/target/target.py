"""The target: a stock mlx-lm model that can also run one forward pass over a token tree.

Axes: N nodes of a tree, V vocabulary, H hidden size, S width of the captured states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.target.caches.batch_cache import BatchCache
from mlx_redrafter.target.caches.model_caches import ModelCaches
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.compiled_pass import CompiledPasses
from mlx_redrafter.target.few_shapes import (
    additive_masks,
    attend_with_additive_mask,
    pays_on_device,
)
from mlx_redrafter.target.hooks import (
    FINAL,
    TreePositions,
    captured,
    install,
    install_in_attention,
    tree_positions,
)
from mlx_redrafter.target.model_parts import find_parts
from mlx_redrafter.target.modules import TargetModules
from mlx_redrafter.trees.tree import TokenTree, TreeBatch

# Note for the user of a model that `is_slow`.
SLOW = (
    "the model computes in 16 bits, which on a CPU is many times slower than 32 bits; use a copy "
    "of its weights that mlx_lm.convert --dtype float32 has made"
)


class TargetOutputs(NamedTuple):
    """Outputs of the target for N tokens.

    Attributes:
        logits: Shape (N, V), the model's dtype.
        hidden_states: Backbone outputs after the final norm, which enter the LM head, shape (N, H).
        states: Inputs of the captured layers side by side, shape (N, S); None without such layers.
    """

    logits: mx.array
    hidden_states: mx.array
    states: mx.array | None = None

    @property
    def alone(self) -> TargetOutputs:
        """The outputs without their axis of sequences, for a single sequence."""
        return self._mapped(lambda array: array.squeeze(0))  # an index would cost a gather

    @property
    def of_roots(self) -> TargetOutputs:
        """The outputs without their axis of nodes, for several sequences of one node each."""
        return self._mapped(lambda array: array.squeeze(1))

    def of(self, rows: int | slice | mx.array) -> TargetOutputs:
        """Select along the first axis: sequences, or nodes of a single one."""
        return self._mapped(lambda array: array[rows])

    def at(self, nodes: Sequence[int]) -> TargetOutputs:
        """Select one node of each sequence from outputs with an axis of sequences, which stays."""
        chosen = mx.array(list(nodes))[:, None, None]
        return self._mapped(lambda array: mx.take_along_axis(array, chosen, axis=1))

    def _mapped(self, select: Callable[[mx.array], mx.array]) -> TargetOutputs:
        states = None if self.states is None else select(self.states)
        return TargetOutputs(select(self.logits), select(self.hidden_states), states)


class Target:
    """A stock mlx-lm model with hooks that let it verify trees; otherwise unchanged.

    Args:
        model: The model.
        compiled: Its compiled passes; by default new ones, which are compiled if that pays.

    Attributes:
        modules: Its modules, for drafters that apply some of them.
        caches: Maker of its caches.
        num_layers: Number of its caches.
        hidden_size: Size of a hidden state, H.
        vocab_size: Number of rows of the input embedding, V.
        context_length: Number of positions for which the model was made; None if its config does
            not say, or if no layer counts tokens.
        devices: Devices of all machines; none for one machine alone.

    Raises:
        UnsupportedTargetError: The architecture is not supported.
    """

    devices: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, compiled: CompiledPasses | None = None):
        parts = find_parts(model)
        self.model = model
        self.num_layers = parts.num_layers
        self.hidden_size = parts.hidden_size
        self.vocab_size = parts.vocab_size
        self.context_length = parts.context_length
        for point in parts.hooks:
            install(point)
        self.modules = TargetModules(model, parts)
        has_buckets = pays_on_device(self.modules.dtype)
        if has_buckets:
            install_in_attention(model, attend_with_additive_mask)
        self.caches = ModelCaches(model, has_buckets)
        self.compiled = CompiledPasses() if compiled is None else compiled

    def share_passes(self, earlier: CompiledPasses | None) -> CompiledPasses:
        """Use the passes of an earlier text if the model has its weights; return those in use."""
        if self.compiled.are_used:
            if earlier is None or not earlier.fit(self.model):
                earlier = CompiledPasses(True)
                earlier.fit(self.model)
            self.compiled = earlier
        return self.compiled

    @property
    def stock_model(self) -> Any:
        """The model, for code that calls it and computes every call, as mlx-lm's loops do."""
        return self.model

    def process_chunk(
        self, chunk: mx.array, cache: TreeCache, layers: Sequence[int]
    ) -> TargetOutputs:
        """Process some tokens of a prompt, shape (n,), which MLX has not computed yet."""
        cache.expect(None)
        outputs = self.compute(chunk[None], cache.stock, layers).alone
        cache.grow(chunk.shape[0])
        return outputs

    def advance(
        self, token: mx.array, cache: TreeCache, layers: Sequence[int] = ()
    ) -> TargetOutputs:
        """Process one token, shape (1,), as plain decoding does; layers are those of `verify`."""
        cache.expect(None)
        outputs = self.compute(token[None], cache.layers, layers).alone
        cache.grow(1)
        return outputs

    def verify(
        self, tree: TokenTree, cache: TreeCache, layers: Sequence[int] = ()
    ) -> TargetOutputs:
        """Process all nodes of a tree at once.

        A node attends to its ancestors and all committed tokens.

        Args:
            tree: N nodes. Node n has the position ``cache.length + depths[n]``.
            cache: Cache that gets the nodes' K/V entries; `TreeCache.commit` keeps some of them.
            layers: Layers whose inputs to capture. `TargetModules.watch` must have hooked them. The
                number of layers stands for the last one's output, `FINAL` for that output after
                the norm.
        """
        step = cache.expect(tree)
        if self.compiled.are_used:
            compiled = self.compiled.verify(self, tree, cache, layers)
            if compiled is not None:
                return TargetOutputs(*compiled).alone
        return self.process_trees(step.tokens, step.positions, cache.layers, layers).alone

    def verify_batch(
        self, trees: TreeBatch, cache: BatchCache, layers: Sequence[int] = ()
    ) -> TargetOutputs:
        """Do for one tree per slot what `verify` does; the outputs have an axis of slots first."""
        step = cache.expect(trees)
        return self.process_trees(step.tokens, step.positions, cache.layers, layers)

    def process_trees(
        self, tokens: mx.array, positions: TreePositions, caches: list[Any], layers: Sequence[int]
    ) -> TargetOutputs:
        """Compute outputs as `compute`, for nodes of trees at these positions."""
        masks = additive_masks() if self.caches.has_buckets else nullcontext()
        with tree_positions(positions), masks:
            return self.compute(tokens, caches, layers)

    def compute(
        self, tokens: mx.array, caches: list[Any] | None, layers: Sequence[int]
    ) -> TargetOutputs:
        """Compute outputs with an axis of sequences, for tokens of shape (sequences, N).

        ``layers`` are captured; without caches the sequences are new ones.
        """
        with captured() as found:
            logits = self.model(tokens, cache=caches)
        states = None
        if layers:
            parts = [found[self.modules.key_of(layer)] for layer in layers]
            states = mx.concatenate(parts, axis=-1)
        return TargetOutputs(logits, found[FINAL], states)


def is_slow(target: Target) -> bool:
    """Return whether a model would be many times faster here in float32."""
    is_half = target.modules.dtype in (mx.float16, mx.bfloat16)
    is_packed = "scales" in target.modules.embedding
    return is_half and not is_packed and mx.default_device().type == mx.DeviceType.cpu
