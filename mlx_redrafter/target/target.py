"""The target: a stock mlx-lm model that can also run one forward pass over a token tree.

Only this folder knows the insides of mlx-lm models.

Axes: N nodes of a tree, V vocabulary, H hidden size, S width of the captured states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, make_prompt_cache

from mlx_redrafter.device_read import to_floats
from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.target.caches.batch_cache import BatchCache
from mlx_redrafter.target.caches.cache_kinds import LAYER_CACHES, parts_of
from mlx_redrafter.target.caches.full import reserve_rows
from mlx_redrafter.target.caches.prompt_cache import check_prompt_cache, num_tokens
from mlx_redrafter.target.caches.quantised import QuantisingCache, check_quantisation
from mlx_redrafter.target.caches.stored_cache import (
    Arrays,
    copy_entries_of,
    copy_states_of,
    fill,
)
from mlx_redrafter.target.caches.tree_cache import TreeCache
from mlx_redrafter.target.compiled_pass import CompiledPasses, waits_for_host
from mlx_redrafter.target.few_shapes import (
    additive_masks,
    attend_with_additive_mask,
    pays_on_device,
)
from mlx_redrafter.target.hooks import (
    HookPoint,
    TreePositions,
    capture_input,
    captured_inputs,
    captured_output,
    install,
    install_in_attention,
    replaced_output,
    tree_positions,
)
from mlx_redrafter.target.model_parts import find_parts
from mlx_redrafter.trees.tree import TokenTree
from mlx_redrafter.trees.tree_batch import TreeBatch

# Note for the user of a model that `is_slow`.
SLOW = (
    "the model computes in 16 bits, which on a CPU is many times slower than 32 bits; use a copy "
    "of its weights that mlx_lm.convert --dtype float32 has made"
)
# Terms under the root of a norm of embeddings that models may have; None for no norm.
ENTRY_TERMS = (None, 1e-6, 1e-5)
# Largest relative error of inputs of the first layer that are computed so, by bfloat16's rounding.
ENTRY_TOLERANCE = 0.01
# Number of tokens to compare for it.
ENTRY_TOKENS = 8
# Minimum correlation of two heads' logits that differ by a scale or a limit only.
MIN_CORRELATION = 0.9

# In a list of layers to capture, the last layer's output after the final norm.
FINAL = -1


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

    def between(self, start: int, end: int) -> TargetOutputs:
        """Select the nodes from ``start`` to ``end`` - 1, of a single sequence."""
        return self._mapped(lambda array: array[start:end])

    @property
    def alone(self) -> TargetOutputs:
        """The outputs without their axis of sequences, for a single sequence."""
        return self._mapped(lambda array: array.squeeze(0))  # an index would cost a gather

    def of(self, sequences: int | mx.array) -> TargetOutputs:
        """Select one or several sequences from outputs with an axis of sequences."""
        return self._mapped(lambda array: array[sequences])

    def at(self, nodes: Sequence[int]) -> TargetOutputs:
        """Select one node of each sequence from outputs with an axis of sequences, which stays."""
        chosen = mx.array(list(nodes))[:, None, None]
        return self._mapped(lambda array: mx.take_along_axis(array, chosen, axis=1))

    def _mapped(self, select: Callable[[mx.array], mx.array]) -> TargetOutputs:
        states = None if self.states is None else select(self.states)
        return TargetOutputs(select(self.logits), select(self.hidden_states), states)


class Target:
    """A stock mlx-lm model with hooks that let it verify trees; otherwise unchanged.

    Attributes:
        model: The model.
        embedding: The model's input embedding.
        blocks: The model's layers, in order.
        num_layers: Number of the model's caches.
        hidden_size: Size of a hidden state, H.
        vocab_size: Number of rows of the input embedding, V.
        context_length: Number of positions for which the model was made; None if its config does
            not say, or if no layer counts tokens.
        has_buckets: Whether trees attend to whole buckets of K/V entries, as in `few_shapes`.
        compiled: Compiled passes over trees; None if they do not pay.
        devices: Devices of all machines; none for one machine alone.

    Raises:
        UnsupportedTargetError: The architecture is not supported.
    """

    devices: tuple[str, ...] = ()

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
        self.has_buckets = pays_on_device(self.dtype)
        if self.has_buckets:
            install_in_attention(model, attend_with_additive_mask)
        self.compiled = CompiledPasses() if waits_for_host() else None

    def share_passes(self, earlier: CompiledPasses | None) -> CompiledPasses | None:
        """Use the passes of an earlier target if the model has its weights; return those in use."""
        if self.compiled is not None:
            if earlier is not None and earlier.fit(self.model):
                self.compiled = earlier
            else:
                self.compiled.fit(self.model)
        return self.compiled

    @property
    def is_first_use(self) -> bool:
        """Whether the newest pass over a tree was compiled, or may have built kernels."""
        return self.compiled is not None and self.compiled.is_first_use

    def looks_ahead(self, cache: TreeCache) -> bool:
        """Whether passes over trees may follow paths in a cache that the host has not read."""
        return self.compiled is not None and not cache.needs_notice

    def may_follow(
        self, tree: TokenTree, cache: TreeCache, layers: Sequence[int], max_length: int
    ) -> bool:
        """Whether a pass over a tree can follow such a path, of ``max_length`` nodes at most."""
        compiled = self.compiled
        return compiled is not None and compiled.may_follow(tree, cache, layers, max_length)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Compile passes at their first use inside, if passes are compiled."""
        if self.compiled is not None:
            self.compiled.is_warming_up = True
        try:
            yield
        finally:
            if self.compiled is not None:
                self.compiled.is_warming_up = False

    @property
    def stock_model(self) -> Any:
        """The model, for code that calls it and computes every call, as mlx-lm's loops do."""
        return self.model

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the rows of the input embedding."""
        return self.embed(mx.zeros((1,), dtype=mx.int32)).dtype

    @property
    def is_slow(self) -> bool:
        """Whether the model would be many times faster here in float32."""
        is_half = self.dtype in (mx.float16, mx.bfloat16) and "scales" not in self.embedding
        return is_half and mx.default_device().type == mx.DeviceType.cpu

    def new_cache(
        self,
        prompt_cache: Sequence[Any] | None = None,
        quantisation: Quantisation | None = None,
        given: list[Any] | None = None,
    ) -> TreeCache:
        """Create the cache of one sequence.

        Args:
            prompt_cache: mlx-lm caches to continue, one per layer; new ones by default.
            quantisation: KV cache quantization, or None.
            given: The caller's list, which begins with ``prompt_cache``. `TreeCache.settle`
                replaces its caches by quantised ones, as mlx-lm does.
        """
        stock = self.stock_cache(prompt_cache)
        layers = [LAYER_CACHES[type(layer)](layer) for layer in stock]
        length = num_tokens(stock) or 0
        has_codes = any(isinstance(part, QuantizedKVCache) for part in parts_of(stock))
        has_buckets = self.has_buckets and not has_codes
        if quantisation is None:
            return TreeCache(layers, length, has_buckets)
        check_quantisation(self.model, quantisation, stock)
        return QuantisingCache(layers, length, quantisation, given, has_buckets)

    def stock_cache(self, prompt_cache: Sequence[Any] | None = None) -> list[Any]:
        """Check the caller's caches as `new_cache` does, or make new ones as mlx-lm does."""
        own: list[Any] = make_prompt_cache(self.model)
        if prompt_cache is None:
            return own
        # Never computed: this pass only gives the caches of used layers their shapes.
        self.model(mx.array([[0]]), cache=own)
        check_prompt_cache(prompt_cache, own)
        return list(prompt_cache)

    def new_batch_cache(self) -> BatchCache:
        """Create a cache of several sequences."""
        return BatchCache(self.has_buckets)

    def blank_cache(self, length: int, quantisation: Quantisation | None = None) -> TreeCache:
        """Create a cache for timing, with K/V entries of zeros in place of ``length`` tokens.

        `TreeCache.settle` shortens the cache. Layers with a state hold that after one token. Blocks
        until MLX has made the entries.
        """
        cache = self.new_cache(quantisation=quantisation)
        mx.eval(self.advance(mx.array([0], dtype=mx.int32), cache).logits)
        self.reserve(cache, length)
        cache.settle(length)
        mx.eval([layer.state for layer in cache.stock])
        return cache

    def reserve(self, cache: TreeCache, num_rows: int) -> None:
        """Give the used layers of a cache that hold K/V entries room for ``num_rows``."""
        kinds = KVCache | ChunkedKVCache | QuantizedKVCache
        reserve_rows([one for one in parts_of(cache.stock) if isinstance(one, kinds)], num_rows)

    def copy_entries(self, layers: Sequence[Any], start: int, end: int) -> Arrays:
        """Copy K/V entries of mlx-lm's caches, as `copy_entries_of` does."""
        return copy_entries_of(layers, start, end)

    def copy_states(self, layers: Sequence[Any]) -> Arrays:
        """Copy windows and states of mlx-lm's caches, as `copy_states_of` does."""
        return copy_states_of(layers)

    def fill(
        self,
        layers: list[Any],
        pieces: Sequence[tuple[Arrays, int]],
        states: Arrays,
        length: int,
        quantisation: Quantisation | None,
    ) -> None:
        """Fill mlx-lm's caches with such copies, as `stored_cache.fill` does."""
        fill(layers, pieces, states, length, quantisation)

    def embed(self, tokens: mx.array) -> mx.array:
        """Look up rows of the input embedding, from ids of shape (n,) to shape (n, H)."""
        return self.embedding(tokens)

    def logits(self, hidden_states: mx.array) -> mx.array:
        """Apply the LM head to `TargetOutputs.hidden_states`, from shape (n, H) to (n, V)."""
        # MLX never computes the part of the model before the head.
        tokens = mx.zeros((1, hidden_states.shape[0]), dtype=mx.int32)
        # The head's dtype; MLX would cast all weights of the head to another one.
        states = hidden_states[None].astype(self.dtype)
        with replaced_output(states):
            logits: mx.array = self.model(tokens)
        return logits[0]

    def entries(self, layer: int, inputs: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """Compute the K/V entries that a layer makes of its inputs, and nothing else of it.

        Args:
            layer: A layer with entries of its own.
            inputs: Its inputs at consecutive tokens, shape (n, H).
            offset: Position of the first of them.

        Returns:
            Keys and values, shape (1, key heads, n, head size).
        """
        recorder = _Recorder(offset)
        self.blocks[layer](inputs.astype(self.dtype)[None], None, recorder)
        assert recorder.entries is not None
        return recorder.entries

    def project(self, hidden_states: mx.array) -> mx.array:
        """Apply the matrix of the LM head alone, from shape (n, H) to (n, V).

        `logits` also applies the model's own scale and limit of logits, if it has them. The first
        call blocks until MLX has computed the logits of one state.
        """
        projected: mx.array = self._head_matrix(hidden_states.astype(self.dtype))
        return projected

    def embed_input(self, tokens: mx.array, normed: bool = True) -> mx.array:
        """Look up the inputs of the first layer, from ids of shape (n,) to shape (n, H).

        ``normed=False`` leaves out a norm of embeddings, but no scale.

        The first call blocks until MLX has computed those of some tokens.
        """
        term, factor = self._entry
        rows = self.embed(tokens)
        if term is not None and not normed:
            return rows
        return _normed(rows, term) * factor

    @property
    def has_embedding_norm(self) -> bool:
        """Whether embeddings are normalised before the first layer; see `embedding_scale`."""
        return self._entry[0] is not None

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings before the first layer.

        The first use blocks until MLX has computed some tokens.
        """
        return self._entry[1]

    def normalise(self, states: mx.array) -> mx.array:
        """Apply the final norm to the last layer's output, shape (n, H).

        The first call blocks until MLX has computed one token, to find the norm.
        """
        normalised: mx.array = self._final_norm(states.astype(self.dtype))
        return normalised

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
            layers: Layers whose inputs to capture. `watch` must have hooked them. The number of
                layers stands for the last one's output, `FINAL` for that output after the norm.
        """
        step = cache.expect(tree)
        if self.compiled is not None:
            compiled = self.compiled.verify(self, tree, cache, layers)
            if compiled is not None:
                return TargetOutputs(*compiled).alone
        return self.process_trees(step.tokens, step.positions, cache.layers, layers).alone

    def verify_batch(
        self, trees: TreeBatch, cache: BatchCache, layers: Sequence[int] = ()
    ) -> TargetOutputs:
        """Process one tree per slot of the cache at once, as `verify` does one tree.

        Returns the outputs of every node, with an axis of slots before the others.
        """
        step = cache.expect(trees)
        return self.process_trees(step.tokens, step.positions, cache.layers, layers)

    def layer_inputs(self, tokens: mx.array, layers: Sequence[int]) -> mx.array:
        """Capture the inputs of layers at all tokens of a new sequence, shape (n,) to (n, S)."""
        states = self.compute(tokens[None], None, layers).alone.states
        assert states is not None
        return states

    def call(self, tokens: mx.array, caches: list[Any] | None) -> mx.array:
        """Call the model, to compute all of the call; without caches for a new sequence."""
        logits: mx.array = self.model(tokens, cache=caches)
        return logits

    def watch(self, layers: Sequence[int]) -> None:
        """Hook layers, so that forward passes can capture their inputs.

        Blocks as `normalise` does if the last layer's output is among them.
        """
        for layer in layers:
            if layer == FINAL:
                continue
            if not 0 <= layer <= len(self.blocks):
                raise UnsupportedTargetError(
                    f"expected inputs of layers 0 to {len(self.blocks) - 1} of the target to draft "
                    f"from, or {len(self.blocks)} for the last output, found {layer}; use a "
                    "drafter trained for this model"
                )
            install(HookPoint(self._reader_of(layer), "__call__", capture_input))
        with captured_output() as outputs, captured_inputs() as inputs:
            self.model(mx.array([[0]]))
        watched = [
            outputs[-1] if layer == FINAL else inputs.get(id(self._reader_of(layer)))
            for layer in layers
        ]
        if any(one is None or one.shape != (1, 1, self.hidden_size) for one in watched):
            raise UnsupportedTargetError(
                f"expected inputs of {self.hidden_size} numbers per token in layers {list(layers)} "
                "of the target, found others; use a recurrent drafter for this model"
            )

    def process_trees(
        self,
        tokens: mx.array,
        positions: TreePositions,
        caches: list[Any],
        layers: Sequence[int],
    ) -> TargetOutputs:
        """Compute outputs as `compute`, for nodes of trees at these positions."""
        masks = additive_masks() if self.has_buckets else nullcontext()
        with tree_positions(positions), masks:
            return self.compute(tokens, caches, layers)

    def compute(
        self, tokens: mx.array, caches: list[Any] | None, layers: Sequence[int]
    ) -> TargetOutputs:
        """Compute outputs with an axis of sequences, for tokens of shape (sequences, N).

        ``layers`` are captured; without caches the sequences are new ones.
        """
        with captured_output() as outputs, captured_inputs() as inputs:
            logits = self.call(tokens, caches)
        final, states = outputs[-1], None
        if layers:
            parts = [final if i == FINAL else inputs[id(self._reader_of(i))] for i in layers]
            states = mx.concatenate(parts, axis=-1)
        return TargetOutputs(logits, final, states)

    def _reader_of(self, layer: int) -> nn.Module:
        """Return the module whose input is a captured state: a layer, or the norm after the last.

        mlx-lm's models pass the residual stream from one to the next.
        """
        is_layer = layer < len(self.blocks)
        reader: nn.Module = self.blocks[layer] if is_layer else self._final_norm
        return reader

    @cached_property
    def _entry(self) -> tuple[float | None, float]:
        """Term of the norm of embeddings before the first layer, or None, and their factor."""
        tokens = mx.arange(min(ENTRY_TOKENS, self.vocab_size))
        self.watch([0])
        inputs, rows = (
            array.astype(mx.float32)
            for array in (self.layer_inputs(tokens, [0]), self.embed(tokens))
        )
        errors, factors = [], []
        for term in ENTRY_TERMS:
            given = _normed(rows, term)
            factors.append(mx.sum(inputs * given) / mx.sum(given * given))
            error = mx.max(mx.abs(inputs - given * factors[-1]))
            errors.append(error / mx.max(mx.abs(inputs)))
        found = to_floats(mx.stack(errors))
        best = found.index(min(found))
        if found[best] > ENTRY_TOLERANCE:
            raise UnsupportedTargetError(
                "expected a model that at most normalises and scales its embeddings, found "
                "another; use another kind of drafter for it"
            )
        return ENTRY_TERMS[best], to_floats(mx.stack(factors))[best]

    @cached_property
    def _head_matrix(self) -> Callable[[mx.array], mx.array]:
        """The LM head without the model's scale and limit of logits."""
        state = mx.random.normal((1, self.hidden_size), key=mx.random.key(0)).astype(self.dtype)
        expected = self.logits(state).astype(mx.float32)
        for module in self.model.modules():
            if not _is_matrix(module, (expected.shape[-1], self.hidden_size)):
                continue
            head: Callable[[mx.array], mx.array] = getattr(module, "as_linear", module)
            if _correlation(head(state), expected) > MIN_CORRELATION:
                return head
        raise UnsupportedTargetError(
            "expected a model whose logits come from one matrix, found another; use a drafter with "
            "a head of its own"
        )

    @cached_property
    def _final_norm(self) -> Any:
        """The norm whose output is the output of the backbone."""
        modules = [self._backbone, *self._backbone.children().values()]
        candidates = [one for one in modules if _is_norm(one, self.hidden_size)]
        for module in candidates:
            install(HookPoint(module, "__call__", capture_input))
        with captured_output() as outputs, captured_inputs() as inputs:
            self.call(mx.array([[0]]), None)
        for module in candidates:
            given = inputs.get(id(module))
            if given is not None and mx.array_equal(module(given), outputs[-1]).item():
                return module
        raise UnsupportedTargetError(
            "expected a model whose LM head gets the output of a norm, found another; use another "
            "kind of drafter for it"
        )


class _Recorder:
    """A cache that records the entries of one pass."""

    def __init__(self, offset: int):
        self.offset = offset
        self.entries: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.entries = keys, values
        return self.entries


def _is_norm(module: Any, hidden_size: int) -> bool:
    weight = module.get("weight") if isinstance(module, nn.Module) else None
    return weight is not None and weight.shape == (hidden_size,)


def _normed(rows: mx.array, term: float | None) -> mx.array:
    """Apply an RMS norm without weights, unless ``term`` is None."""
    return rows if term is None else mx.fast.rms_norm(rows, None, term)


def _is_matrix(module: Any, shape: tuple[int, int]) -> bool:
    """Whether a module is a matrix of this shape, quantised or not."""
    weight = module.get("weight")
    if weight is None or weight.ndim != 2:
        return False
    rows, columns = weight.shape
    return (rows, columns * 32 // module.bits if "scales" in module else columns) == shape


def _correlation(a: mx.array, b: mx.array) -> float:
    """Return the correlation of two arrays of numbers."""
    a, b = (array.astype(mx.float32) - mx.mean(array.astype(mx.float32)) for array in (a, b))
    correlation = mx.sum(a * b) / mx.sqrt(mx.sum(a * a) * mx.sum(b * b))
    return to_floats(correlation[None])[0]
