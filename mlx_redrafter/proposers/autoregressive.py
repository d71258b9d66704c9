"""Networks with K/V entries that draft one token after another: EAGLE heads, MTP modules.

Axes: n tokens, W beams, H hidden size, V rows of the head.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.expansion import Expansion
from mlx_redrafter.proposers.kv_drafting import KvDrafting
from mlx_redrafter.proposers.kv_network import KvNetwork
from mlx_redrafter.proposers.scores import NoiseRank, log_probs
from mlx_redrafter.proposers.search import search
from mlx_redrafter.target.target import Target


class AutoregressiveNetwork(KvNetwork):
    """A network that drafts a token at a time, and reads its own output for the draft before."""

    @abstractmethod
    def feed_back(self, outputs: mx.array) -> mx.array:
        """Compute the features that replace the target's after drafts, shape (n, H) to (n, H)."""

    @abstractmethod
    def logits(self, outputs: mx.array, target: Target) -> mx.array:
        """Compute logits of the token after each pair, shape (n, H) to (n, V), or more columns."""

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> KvDrafting[Any]:
        return AutoregressiveDrafting(self, target, prompt, couple_noise, cached)


class AutoregressiveDrafting(KvDrafting[AutoregressiveNetwork]):
    """Drafts of one sequence by such a network."""

    def expand(self, flight: PendingPass, shape: DraftShape, rank: NoiseRank | None) -> Expansion:
        return search(_Levels(self, flight), shape, rank)


class _Levels:
    """The network after one root; a `LevelScorer`."""

    def __init__(self, drafting: AutoregressiveDrafting, flight: PendingPass):
        self.drafting = drafting
        self.network = drafting.network
        self.flight = flight
        self.num_rows = self.network.num_rows
        self.to_token_ids = self.network.to_token_ids

    def first(self) -> mx.array:
        self._outputs = self.drafting.read_flight(self.flight)
        self._lineage = self.drafting.lineage_after(self.flight)
        return self._log_probs()

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """Process the beams; those of the first level share the root's output."""
        width = tokens.shape[0]
        features = self.network.feed_back(self._outputs)
        features = (
            mx.broadcast_to(features, (width, features.shape[-1]))
            if beams is None
            else features[beams]
        )
        level = self._lineage.extend(beams, width, depth)
        self._outputs = self.drafting.read_level(features, tokens, *level)
        return self._log_probs()

    def _log_probs(self) -> mx.array:
        logits = self.network.logits(self._outputs, self.drafting.target)
        return log_probs(logits, self.num_rows)
