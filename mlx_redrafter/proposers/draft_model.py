"""Draft models: any supported mlx-lm model with the token ids of the target.

Axes: W beam width, V token ids that both models have.

After a tree, the pass over the accepted path processes its drafts again, together with the new
root. Drafts of a chain have their entries in the order of the sequence, so accepted ones stay, as
in mlx-lm, and the host has to know their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_redrafter.checks import check_instance
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import Group
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.errors import CheckpointError, ConfigError, UnsupportedTargetError, shown
from mlx_redrafter.proposers.draft_network import READ_STEP_SIZE, CachedDrafting
from mlx_redrafter.proposers.kind import UNKNOWN, Shapes, TargetFacts
from mlx_redrafter.proposers.search import (
    COUPLING_WEIGHT,
    Expansion,
    NoiseRank,
    log_probs,
    search_all,
)
from mlx_redrafter.target.caches.cache_kinds import describe
from mlx_redrafter.target.caches.draft_cache import DraftMask, attend_to_drafts
from mlx_redrafter.target.hooks import TreePositions, install_in_attention, tree_positions
from mlx_redrafter.target.model_loading import load_model
from mlx_redrafter.target.target import Target

NAME = "draft model"


def recognise(config: Mapping[str, Any], shapes: Shapes) -> bool:
    """Return whether a config names a model; published heads may copy a model's config."""
    return "model_type" in config


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> DraftModel:
    """Load a model; only the target's repository may run code, so this one does not."""
    return DraftModel(*load_model(str(path_or_repo)))


class DraftModel:
    """A draft model, as `Proposer`."""

    max_length: int | None = None
    row_ids: mx.array | None = None
    coupling_weight = COUPLING_WEIGHT
    is_joint = False

    def __init__(self, model: nn.Module, tokenizer: Any):
        check_instance("model", model, nn.Module, "a model of mlx-lm")
        self.target = Target(model)
        if others := _other_caches(make_prompt_cache(model)):
            raise UnsupportedTargetError(
                f"expected a draft model whose layers attend to all tokens, found one with caches "
                f"{others}; use another draft model or a drafter"
            )
        self.tokenizer = tokenizer
        self.networks = (self.target.model,)
        self.num_layers, self.num_rows = self.target.num_layers, self.target.vocab_size
        install_in_attention(model, attend_to_drafts)

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        check_ids(self.tokenizer, tokenizer)

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> ModelDrafting:
        return ModelDrafting(self, target.vocab_size, prompt, couple_noise, cached)

    def expand(self, group: Group, shape: DraftShape, rank: NoiseRank | None) -> Expansion:
        """Score continuations of a pass of one sequence, as `DraftNetwork.expand` does."""
        (pair,) = group
        levels = _ChainLevels(*pair) if shape.width == 1 else _TreeLevels(*pair)
        return search_all(levels, shape, rank)


def check_ids(draft: Any, target: Any) -> None:
    """Check that two tokenizers give the same tokens the same ids."""
    if draft is target:
        return
    if not hasattr(draft, "get_vocab"):
        raise ConfigError(f"tokenizer must be the draft model's tokenizer, got {shown(draft)}")
    ours, theirs = ({i: t for t, i in one.get_vocab().items()} for one in (draft, target))
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i):
            raise CheckpointError(
                f"the draft model's token ids are not the target's: id {i} is {ours.get(i)!r} for "
                f"the draft model and {theirs.get(i)!r} for the target; use a draft model of the "
                "same family"
            )


def _other_caches(layers: Sequence[Any]) -> str:
    return ", ".join(sorted({describe(layer) for layer in layers if type(layer) is not KVCache}))


class ModelDrafting(CachedDrafting):
    def __init__(
        self,
        network: DraftModel,
        vocab_size: int,
        prompt: Sequence[int],
        couple_noise: bool,
        cached: Sequence[Any],
    ):
        self.model = network.target
        self.num_rows = min(vocab_size, network.num_rows)
        layers = self.model.caches.stock(cached or None)
        if others := _other_caches(layers):
            raise UnsupportedTargetError(
                f"expected KVCache() in the draft model's layers of prompt_cache, found {others}; "
                "leave these layers out, or make them with make_prompt_cache(draft_model)"
            )
        super().__init__(network, couple_noise, layers, bool(cached))
        # Tokens that the host knows and that have no entry yet.
        self._unread = list(prompt)
        # Number of entries of a chain's drafts, after those of known tokens.
        self._ahead = 0

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def note(self, flight: Pass) -> None:
        """Count a pass's tokens: the accepted drafts of a chain have their entries already."""
        num_there = min(self._ahead, len(flight.tokens) - 1)
        self.length += num_there
        self._unread += flight.tokens[num_there:]
        self._ahead = 0

    def process_unread(self, flight: Pass | None = None) -> mx.array:
        self.cache.keep(self.length)
        self._ahead = 0
        while len(self._unread) > READ_STEP_SIZE:
            self._forward(mx.array(self._unread[:READ_STEP_SIZE], dtype=mx.int32))
            mx.eval([layer.stock.state for layer in self.cache.layers])
            self.length += READ_STEP_SIZE
            del self._unread[:READ_STEP_SIZE]
        tokens = mx.array(self._unread, dtype=mx.int32)
        self.length += len(self._unread)
        self._unread = []
        if flight is not None:
            tokens = mx.concatenate([tokens, flight.following_tokens])
        return self._forward(tokens)

    def read_level(self, tokens: mx.array, mask: DraftMask, positions: TreePositions) -> mx.array:
        """Process the newest tokens of the beams, (W,), on entries aside; logits, shape (W, V)."""
        self.cache.expect_drafts(mask)
        with tree_positions(positions):
            return self._forward(tokens)

    def read_tokens(self, flight: Pass) -> mx.array:
        """Process a pass's tokens, which the host knows; logits after them, shape (1, V)."""
        self._flight = None  # a chain counts its tokens by itself
        self.note(flight)
        return self.process_unread()[-1:]

    def read_known(self) -> None:
        """Process all tokens that the host knows, and forget the entries of drafts aside."""
        self.count_flight()
        if self._unread:
            self.process_unread()
        self.cache.keep(self.cache.num_rows)

    def read_draft(self, token: mx.array) -> mx.array:
        """Process the newest token of a chain, (1,), on an entry behind; logits, shape (1, V)."""
        logits = self._forward(token)
        self._ahead += 1
        # Several writes to one buffer in a graph would copy it each time.
        mx.async_eval(logits)
        return logits

    def _forward(self, tokens: mx.array) -> mx.array:
        logits = self.model.model(tokens[None], cache=self.cache.layers)[0]
        return logits[:, : self.num_rows]


class DraftLevels:
    """A draft model after one root; a `LevelScorer`. Rows of its head are token ids."""

    def __init__(self, drafting: ModelDrafting):
        self.drafting = drafting

    def to_token_ids(self, rows: mx.array) -> mx.array:
        return rows.astype(mx.int32)


class _TreeLevels(DraftLevels):
    """A draft model that drafts a tree, each level in one pass."""

    def __init__(self, drafting: ModelDrafting, flight: Pass):
        super().__init__(drafting)
        self.flight = flight

    def first(self) -> mx.array:
        logits = self.drafting.read_flight(self.flight)
        self._lineage = self.drafting.lineage_after(self.flight)
        return log_probs(logits)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        level = self._lineage.extend(beams, tokens.shape[0], depth)
        return log_probs(self.drafting.read_level(tokens, *level))


class _ChainLevels(_TreeLevels):
    """A draft model that drafts a chain; the host waits for the pass."""

    def first(self) -> mx.array:
        return log_probs(self.drafting.read_tokens(self.flight))

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        return log_probs(self.drafting.read_draft(tokens))
