"""What `KvDrafting` asks of a network with K/V rows of its own: EAGLE, MTP, SpecFormer.

Axes: n tokens, S width of the target's states, H hidden size, V rows of the head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_redrafter.target.target import Target


class KvNetwork(nn.Module, ABC):
    """A network that drafts from pairs: a state of the target, and the token that came after it.

    Its layers attend to all pairs before, with `mlx_lm`'s attention and rotary embeddings.
    """

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of its layers, each with K/V rows."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Number of tokens that it proposes, V."""

    @property
    @abstractmethod
    def row_ids(self) -> mx.array | None:
        """Token ids of the rows of its head, integer, shape (V,); None for the first V tokens."""

    @abstractmethod
    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """See `Proposer.check_fit`."""

    @abstractmethod
    def captured_layers(self, target: Target) -> Sequence[int]:
        """Layers of the target whose inputs it reads, and `target.FINAL`."""

    @abstractmethod
    def fuse(self, states: mx.array) -> mx.array:
        """What it makes of the target's states, shape (n, S) to (n, H)."""

    @abstractmethod
    def __call__(self, features: mx.array, embeddings: mx.array, caches: Sequence[Any]) -> mx.array:
        """Process pairs after those in its caches.

        Args:
            features: Rows of `fuse`, or of `AutoregressiveNetwork.feed_back`, shape (n, H).
            embeddings: Rows of the target's input embedding, shape (n, H).
            caches: A cache for every layer, which says what the pairs see (``make_mask``).

        Returns:
            Shape (n, H).
        """

    def make_cache(self) -> list[KVCache]:
        """New caches of its layers, where mlx-lm's ``make_prompt_cache`` looks for them."""
        return [KVCache() for _ in range(self.num_layers)]


class AutoregressiveNetwork(KvNetwork):
    """One that drafts a token at a time: it reads what it made of the draft before."""

    @abstractmethod
    def feed_back(self, outputs: mx.array) -> mx.array:
        """What stands for the target's states after drafts, shape (n, H) to (n, H)."""

    @abstractmethod
    def logits(self, outputs: mx.array, target: Target) -> mx.array:
        """Logits of the token after each pair, shape (n, H) to (n, V), or more columns."""
