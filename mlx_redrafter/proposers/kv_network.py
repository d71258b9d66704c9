"""Networks with K/V entries of their own that draft from states of the target.

Axes: n tokens, S width of the target's states, H hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.target.caches.draft_cache import hook_attention
from mlx_redrafter.target.model_parts import hook_positions
from mlx_redrafter.target.target import Target


class KvNetwork(DraftNetwork):
    """A network that drafts from pairs: a state of the target, and the token that came after it.

    Its layers attend to all pairs before, with mlx-lm's attention and rotary embeddings.
    """

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of its layers, each with K/V entries."""

    @abstractmethod
    def captured_layers(self, target: Target) -> Sequence[int]:
        """Return the layers of the target whose inputs it reads, and `target.FINAL`."""

    @abstractmethod
    def fuse(self, states: mx.array) -> mx.array:
        """Compute features from the target's states, shape (n, S) to (n, H)."""

    def embed(self, tokens: mx.array, target: Target) -> mx.array:
        """Look up the embeddings of tokens, shape (n,) to (n, H): the target's, or its own."""
        return target.embed(tokens)

    @abstractmethod
    def __call__(self, features: mx.array, embeddings: mx.array, caches: Sequence[Any]) -> mx.array:
        """Process pairs after those in its caches; outputs, shape (n, H).

        Args:
            features: Rows of `fuse`, or of `AutoregressiveNetwork.feed_back`, shape (n, H).
            embeddings: Rows of `embed`, shape (n, H).
            caches: A cache for every layer; its ``make_mask`` decides what the pairs see.
        """

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        super().check_fit(target, tokenizer)
        self.hook()
        target.watch(self.captured_layers(target))

    def hook(self) -> None:
        """Let the layers work on trees: their attention, and their rotary embeddings."""
        hook_attention(self)
        hook_positions(self)

    def make_cache(self) -> list[KVCache]:
        """Make new caches for its layers; mlx-lm's ``make_prompt_cache`` calls this."""
        return [KVCache() for _ in range(self.num_layers)]
