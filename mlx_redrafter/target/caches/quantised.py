"""Layers that attend to all tokens and keep quantised rows, as mlx-lm does with ``kv_bits``.

mlx-lm quantises a row before anything attends to it, and each row by itself. So the rows of trees
are kept aside as they come, and are quantised to the same codes whenever they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from mlx_redrafter.errors import ConfigError, UnsupportedTargetError, first_line
from mlx_redrafter.generation_options import Quantisation
from mlx_redrafter.target.caches.full import FullCache
from mlx_redrafter.target.caches.tree_cache import LayerCache, TreeCache
from mlx_redrafter.trees.tree import TokenTree


class QuantisedCache(FullCache):
    """The `LayerCache` of full attention, on top of mlx-lm's ``QuantizedKVCache``."""

    stock: QuantizedKVCache

    @property
    def bits(self) -> int:
        """Bits of a number; mlx-lm's attention takes codes from a cache that has them."""
        return int(self.stock.bits)

    @property
    def group_size(self) -> int:
        """Numbers that share a scale."""
        return int(self.stock.group_size)


class QuantisingCache(TreeCache):
    """A `TreeCache` whose rows are quantised once the text is long enough.

    Args:
        layers: See `TreeCache`.
        length: See `TreeCache`.
        quantisation: Quantisation of the rows.
        given: The caller's list of caches, None for none.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache],
        length: int,
        quantisation: Quantisation,
        given: list[Any] | None,
    ):
        super().__init__(layers, length)
        self._quantisation = quantisation
        self._given = [] if given is None else given
        self._is_due = any(hasattr(layer.stock, "to_quantized") for layer in layers)

    def grow(self, num_tokens: int) -> None:
        """See `TreeCache.grow`; quantises after a forward pass, as mlx-lm does."""
        super().grow(num_tokens)
        if self._is_due and self.length >= self._quantisation.start:
            self._quantise()

    def takes(self, tree: TokenTree) -> bool:
        """See `TreeCache.takes`; no tree has nodes before the start and after it."""
        if not self._is_due:
            return True
        return self.length + tree.max_depth < self._quantisation.start

    def settle(self, length: int) -> None:
        """See `TreeCache.settle`; the caller's list has the quantised layers from now on."""
        super().settle(length)
        if self._given:
            self._given[: len(self.layers)] = self.stock

    def _quantise(self) -> None:
        how = self._quantisation
        for number, layer in enumerate(self.layers):
            if not hasattr(layer.stock, "to_quantized"):  # of another kind, as mlx-lm leaves it
                continue
            layer.settle(self.length)
            if layer.stock.offset >= how.start:  # unlike that of a layer without rows
                quantised = layer.stock.to_quantized(how.group_size, how.bits)
                self.layers[number] = QuantisedCache(quantised)
                layer.stock.state = None, None, 0  # the caller may hold it as long as the text
        self._is_due = False


def check_quantisation(model: nn.Module, quantisation: Quantisation, layers: Sequence[Any]) -> None:
    """Check that mlx-lm can quantise the rows of a model.

    Args:
        model: The model.
        quantisation: Quantisation of the rows.
        layers: mlx-lm caches to go on with.

    Raises:
        ConfigError: Caches are quantised in another way already.
        UnsupportedTargetError: mlx-lm cannot.
    """
    bits, group_size = quantisation.bits, quantisation.group_size
    for layer in layers:
        found = getattr(layer, "bits", bits), getattr(layer, "group_size", group_size)
        if found != (bits, group_size):
            raise ConfigError(
                f"prompt_cache has rows of {found[0]} bits in groups of {found[1]}; give the same "
                f"kv_bits and kv_group_size, not {bits} and {group_size}, or neither"
            )
    own: list[Any] = make_prompt_cache(model)
    try:
        # Never computed: it tells whether there are caches, sizes or attention that cannot.
        model(mx.array([[0]]), cache=own)
        maybe_quantize_kv_cache(own, 0, group_size, bits)
        model(mx.array([[0]]), cache=own)
    except Exception as error:  # each model has its own attention
        raise UnsupportedTargetError(
            f"mlx-lm cannot quantise this model's keys and values to {bits} bits in groups of "
            f"{group_size}: {first_line(error)}; leave out kv_bits or choose another kv_group_size"
        ) from error
