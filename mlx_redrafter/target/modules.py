"""Modules of a model that drafters apply by themselves: embedding, final norm and LM head.

mlx-lm's families name, scale and limit them differently, so they are found by what they compute.

Axes: V vocabulary, H hidden size.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ConcatenateKVCache

from mlx_redrafter.device_read import to_floats
from mlx_redrafter.errors import UnsupportedTargetError
from mlx_redrafter.target.hooks import (
    FINAL,
    HookPoint,
    capture_input,
    captured,
    install,
    replaced_output,
)
from mlx_redrafter.target.model_parts import Parts

# Terms under the root of a norm of embeddings that models may have; None for no norm.
ENTRY_TERMS = (None, 1e-6, 1e-5)
# Largest relative error of inputs of the first layer that are computed so, by bfloat16's rounding.
ENTRY_TOLERANCE = 0.01
# Number of tokens to compare for it.
ENTRY_TOKENS = 8
# Minimum correlation of two heads' logits that differ by a scale or a limit only.
MIN_CORRELATION = 0.9


class TargetModules:
    """The modules of a model whose hooks are installed, and what its forward pass makes of them."""

    def __init__(self, model: nn.Module, parts: Parts):
        self._model, self.parts = model, parts
        self.embedding = parts.embedding
        self.layers: list[nn.Module] = list(model.layers)

    def call(self, tokens: mx.array) -> mx.array:
        """Call the model for a new sequence, shape (1, n), to compute all of the call."""
        return self._model(tokens)

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the rows of the input embedding."""
        return self.embed(mx.zeros((1,), dtype=mx.int32)).dtype

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
            return self._model(tokens)[0]

    def entries(self, layer: int, inputs: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """Compute the K/V entries that a layer makes of its inputs, and nothing else of it.

        The inputs are those at consecutive tokens from position ``offset`` on, shape (n, H).
        Returns keys and values, shape (1, key heads, n, head size).
        """
        recorder = ConcatenateKVCache()
        recorder.offset = offset
        self.layers[layer](inputs.astype(self.dtype)[None], None, recorder)
        keys, values = recorder.keys_and_values()
        return keys, values

    def project(self, hidden_states: mx.array) -> mx.array:
        """Apply the matrix of the LM head alone, from shape (n, H) to (n, V).

        `logits` also applies the model's own scale and limit of logits, if it has them. The first
        call blocks until MLX has computed the logits of one state.
        """
        return self._head_matrix(hidden_states.astype(self.dtype))

    def embed_input(self, tokens: mx.array, normed: bool = True) -> mx.array:
        """Look up the inputs of the first layer, from ids of shape (n,) to shape (n, H).

        ``normed=False`` leaves out a norm of embeddings, but no scale. The first call blocks until
        MLX has computed those of some tokens.
        """
        term, factor = self.entry
        rows = self.embed(tokens)
        if term is not None and not normed:
            return rows
        return _normed(rows, term) * factor

    def normalise(self, states: mx.array) -> mx.array:
        """Apply the final norm to states, shape (n, H); the first call waits for one token."""
        return self.final_norm(states.astype(self.dtype))

    def watch(self, layers: Sequence[int]) -> None:
        """Hook layers, so that forward passes can capture their inputs.

        Blocks as `normalise` does if the last layer's output is among them.
        """
        for layer in layers:
            if layer == FINAL:
                continue
            if not 0 <= layer <= len(self.layers):
                raise UnsupportedTargetError(
                    f"expected inputs of layers 0 to {len(self.layers) - 1} of the target to draft "
                    f"from, or {len(self.layers)} for the last output, found {layer}; use a "
                    "drafter trained for this model"
                )
            install(HookPoint(self.reader_of(layer), "__call__", capture_input))
        with captured() as found:
            self._model(mx.array([[0]]))
        watched = [found.get(self.key_of(layer)) for layer in layers]
        size = self.parts.hidden_size
        if any(one is None or one.shape != (1, 1, size) for one in watched):
            raise UnsupportedTargetError(
                f"expected inputs of {size} numbers per token in layers {list(layers)} "
                "of the target, found others; use a recurrent drafter for this model"
            )

    def reader_of(self, layer: int) -> nn.Module:
        """Return the module whose input is a captured state: a layer, or the norm after the last.

        mlx-lm's models pass the residual stream from one to the next.
        """
        return self.layers[layer] if layer < len(self.layers) else self.final_norm

    def key_of(self, layer: int) -> int:
        """Return the key of a layer's inputs, or of `FINAL`, among `captured` arrays."""
        return FINAL if layer == FINAL else id(self.reader_of(layer))

    @cached_property
    def entry(self) -> tuple[float | None, float]:
        """Term of the norm of embeddings before the first layer, or None, and their factor.

        The first use blocks until MLX has computed the inputs of the first layer at some tokens.
        """
        tokens, first = mx.arange(min(ENTRY_TOKENS, self.parts.vocab_size)), self.layers[0]
        self.watch([0])
        with captured() as found:
            self.call(tokens[None])
        inputs, rows = found[id(first)][0].astype(mx.float32), self.embed(tokens).astype(mx.float32)
        errors, factors = [], []
        for term in ENTRY_TERMS:
            given = _normed(rows, term)
            factors.append(mx.sum(inputs * given) / mx.sum(given * given))
            error = mx.max(mx.abs(inputs - given * factors[-1]))
            errors.append(error / mx.max(mx.abs(inputs)))
        failed = to_floats(mx.stack(errors))
        best = failed.index(min(failed))
        if failed[best] > ENTRY_TOLERANCE:
            raise UnsupportedTargetError(
                "expected a model that at most normalises and scales its embeddings, found "
                "another; use another kind of drafter for it"
            )
        return ENTRY_TERMS[best], to_floats(mx.stack(factors))[best]

    @cached_property
    def _head_matrix(self) -> Callable[[mx.array], mx.array]:
        """The LM head without the model's scale and limit of logits."""
        size = self.parts.hidden_size
        state = mx.random.normal((1, size), key=mx.random.key(0)).astype(self.dtype)
        expected = self.logits(state).astype(mx.float32)
        for module in self._model.modules():
            if _is_matrix(module, (expected.shape[-1], size)):
                head: Callable[[mx.array], mx.array] = getattr(module, "as_linear", module)
                if _correlation(head(state), expected) > MIN_CORRELATION:
                    return head
        raise UnsupportedTargetError(
            "expected a model whose logits come from one matrix, found another; use a drafter with "
            "a head of its own"
        )

    @cached_property
    def final_norm(self) -> Any:
        """The norm whose output is the output of the backbone."""
        backbone: Any = self.parts.hooks[0].owner
        modules = [backbone, *backbone.children().values()]
        candidates = [one for one in modules if _is_norm(one, self.parts.hidden_size)]
        for module in candidates:
            install(HookPoint(module, "__call__", capture_input))
        with captured() as found:
            self.call(mx.array([[0]]))
        for module in candidates:
            given = found.get(id(module))
            if given is not None and mx.array_equal(module(given), found[FINAL]).item():
                return module
        raise UnsupportedTargetError(
            "expected a model whose LM head gets the output of a norm, found another; use another "
            "kind of drafter for it"
        )


def _is_norm(module: Any, hidden_size: int) -> bool:
    weight = module.get("weight") if isinstance(module, nn.Module) else None
    return weight is not None and weight.shape == (hidden_size,)


def _normed(rows: mx.array, term: float | None) -> mx.array:
    """Apply an RMS norm without weights, unless ``term`` is None."""
    return rows if term is None else mx.fast.rms_norm(rows, None, term)


def _is_matrix(module: Any, shape: tuple[int, int]) -> bool:
    """Return whether a module is a matrix of this shape, quantised or not."""
    weight = module.get("weight")
    if weight is None or weight.ndim != 2:
        return False
    rows, columns = weight.shape
    return (rows, columns * 32 // module.bits if "scales" in module else columns) == shape


def _correlation(a: mx.array, b: mx.array) -> float:
    a, b = (array.astype(mx.float32) - mx.mean(array.astype(mx.float32)) for array in (a, b))
    correlation = mx.sum(a * b) / mx.sqrt(mx.sum(a * a) * mx.sum(b * b))
    return to_floats(correlation[None])[0]
