"""KV cache quantization for layers that attend to all tokens, as mlx-lm does it with ``kv_bits``.

mlx-lm quantises every K/V entry on its own, before anything attends to it. So an entry of a tree
gets the same codes whenever the cache writes it.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from mlx_redrafter.errors import ConfigError, UnsupportedTargetError, first_line
from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.target.caches.full import FullCache
from mlx_redrafter.target.caches.tree_cache import TreeCache, parts_of
from mlx_redrafter.trees.tree import TokenTree


class QuantisedCache(FullCache):
    """The `LayerCache` of full attention, on top of mlx-lm's ``QuantizedKVCache``."""

    stock: QuantizedKVCache

    @property
    def bits(self) -> int:
        """Bits per element. mlx-lm's attention expects codes from a cache with this attribute."""
        return int(self.stock.bits)

    @property
    def group_size(self) -> int:
        return int(self.stock.group_size)


class QuantisingCache(TreeCache):
    """A `TreeCache` that quantises its entries once the sequence is long enough."""

    needs_notice = True

    def __init__(
        self,
        layers: Sequence[Any],
        length: int,
        quantisation: Quantisation,
        given: list[Any] | None,
        has_buckets: bool = False,
    ):
        super().__init__(layers, length, has_buckets)
        self._quantisation = quantisation
        self._given = [] if given is None else given
        self._is_due = any(hasattr(layer.stock, "to_quantized") for layer in layers)

    @property
    def may_move(self) -> bool:
        return super().may_move and not self._is_due

    @property
    def may_split(self) -> bool:
        return not self._is_due

    def grow(self, num_tokens: int) -> None:
        super().grow(num_tokens)  # after a forward pass, as in mlx-lm
        if self._is_due and self.length >= self._quantisation.start:
            self._quantise()

    def takes(self, tree: TokenTree) -> bool:
        """Reject a tree with nodes on both sides of the length at which quantization starts."""
        return not self._is_due or self.length + tree.max_depth < self._quantisation.start

    def trim_to(self, length: int) -> None:
        super().trim_to(length)
        if self._given:  # as mlx-lm does, replace the caller's caches by quantised ones
            self._given[: len(self.layers)] = self.stock

    def _quantise(self) -> None:
        how = self._quantisation
        for number, layer in enumerate(self.layers):
            if not hasattr(layer.stock, "to_quantized"):  # mlx-lm leaves these kinds alone
                continue
            layer.trim_to(self.length)
            if layer.stock.offset >= how.start:  # false for a layer that the model never uses
                quantised = layer.stock.to_quantized(how.group_size, how.bits)
                self.layers[number] = QuantisedCache(quantised)
                layer.stock.state = None, None, 0  # free memory even if the caller holds the cache
        self.parts = parts_of(self.layers)
        self._is_due = False
        # mlx-lm's attention to codes consists of products, which have no graphs per shape.
        self.has_buckets = False


def check_quantisation(model: nn.Module, quantisation: Quantisation, layers: Sequence[Any]) -> None:
    """Check that mlx-lm can quantise the K/V cache of a model."""
    bits, group_size = quantisation.bits, quantisation.group_size
    for layer in layers:
        found = getattr(layer, "bits", bits), getattr(layer, "group_size", group_size)
        if found != (bits, group_size):
            raise ConfigError(
                f"prompt_cache has entries of {found[0]} bits in groups of {found[1]}; give the "
                f"same kv_bits and kv_group_size, not {bits} and {group_size}, or neither"
            )
    own: list[Any] = make_prompt_cache(model)
    try:
        # Never computed: mlx-lm checks sizes, caches and attention while it builds the graph.
        model(mx.array([[0]]), cache=own)
        maybe_quantize_kv_cache(own, 0, group_size, bits)
        model(mx.array([[0]]), cache=own)
    except Exception as error:  # each model's attention may raise its own kind
        raise UnsupportedTargetError(
            f"mlx-lm cannot quantise this model's keys and values to {bits} bits in groups of "
            f"{group_size}: {first_line(error)}; leave out kv_bits or choose another kv_group_size"
        ) from error
