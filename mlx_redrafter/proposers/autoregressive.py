"""Networks with K/V entries that draft one token after another: EAGLE heads, MTP modules.

Axes: n tokens, W beams of each sequence, H hidden size, V rows of the head.
"""

from __future__ import annotations

from abc import abstractmethod

import mlx.core as mx

from mlx_redrafter.decoding.protocols import Group
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.kv_drafting import KvNetwork, read_flights, read_levels
from mlx_redrafter.proposers.search import Expansion, NoiseRank, log_probs, search_all
from mlx_redrafter.target.target import Target


class AutoregressiveNetwork(KvNetwork):
    """A network that drafts a token at a time, and reads its own output for the draft before."""

    @abstractmethod
    def feed_back(self, outputs: mx.array) -> mx.array:
        """Compute the features that replace the target's after drafts, shape (n, H) to (n, H)."""

    @abstractmethod
    def logits(self, outputs: mx.array, target: Target) -> mx.array:
        """Compute logits of the token after each pair, shape (n, H) to (n, V), or more columns."""

    def expand(self, group: Group, shape: DraftShape, rank: NoiseRank | None) -> Expansion:
        return search_all(_Levels(group), shape, rank)


class _Levels:
    """The network after one root of each sequence; a `LevelScorer`."""

    def __init__(self, group: Group):
        self.group, self.draftings = group, [one for one, _ in group]
        self.network, self.target = self.draftings[0].network, self.draftings[0].target
        self.to_token_ids = self.network.to_token_ids

    def first(self) -> mx.array:
        self._outputs = read_flights(self.group)
        self._lineages = [drafting.lineage_after(flight) for drafting, flight in self.group]
        return self._log_probs()

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """Process the beams; those of the first level share the outputs of their roots."""
        count, roots = tokens.shape[0], len(self.draftings)
        width = count // roots
        features = self.network.feed_back(self._outputs)
        if beams is not None:
            features = features[beams]
        elif features.shape[0] != count:
            features = mx.broadcast_to(features, (count, features.shape[-1]))
        own: list[mx.array | None] = [beams] * roots
        if beams is not None and roots > 1:
            own = [part - number * width for number, part in enumerate(mx.split(beams, roots))]
        levels = [
            lineage.extend(beams, width, depth)
            for lineage, beams in zip(self._lineages, own, strict=True)
        ]
        self._outputs = read_levels(self.draftings, features, tokens, levels)
        return self._log_probs()

    def _log_probs(self) -> mx.array:
        return log_probs(self.network.logits(self._outputs, self.target), self.network.num_rows)
