"""Draft models: any supported mlx-lm model with the token ids of the target.

Axes: W beam width, L beam length, V token ids that both models have, n tokens.

The state of a sequence is the K/V entries of its committed tokens. After a tree, one pass of L rows
reads the accepted drafts again together with the new root, and only the device knows how many of
the rows count. Entries beyond are junk that no query sees, until later ones overwrite it. So
rolling back sets an offset, and the host reads nothing. Drafts of a chain have their entries in the
order of the sequence, so accepted ones stay, as in mlx-lm, and the host has to know their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import CheckpointError, UnsupportedTargetError
from mlx_redrafter.proposers.expansion import build_tree
from mlx_redrafter.proposers.kind import Shapes
from mlx_redrafter.proposers.kv_drafting import READ_STEP_SIZE
from mlx_redrafter.proposers.scores import Rank, log_probs, ranking
from mlx_redrafter.proposers.search import LevelScorer, search
from mlx_redrafter.proposers.target_facts import UNKNOWN, TargetFacts
from mlx_redrafter.target.caches.cache_kinds import describe
from mlx_redrafter.target.caches.draft_cache import (
    DraftCache,
    DraftLineage,
    DraftMask,
    hook_attention,
)
from mlx_redrafter.target.hooks import TreePositions, tree_positions
from mlx_redrafter.target.model_loading import load_model
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

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

    def __init__(self, model: nn.Module, tokenizer: Any):
        self.target = Target(model)
        others = _other_caches(make_prompt_cache(model))
        if others:
            raise UnsupportedTargetError(
                f"expected a draft model whose layers attend to all tokens, found one with caches "
                f"{others}; use another draft model or a drafter"
            )
        self.tokenizer = tokenizer
        hook_attention(model)

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        return (self.target.model,)

    @property
    def num_layers(self) -> int:
        return self.target.num_layers

    @property
    def num_rows(self) -> int:
        return self.target.vocab_size

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """Raise `CheckpointError` unless tokens have the same ids."""
        check_ids(self.tokenizer, tokenizer)

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> ModelDrafting:
        return ModelDrafting(self.target, target.vocab_size, prompt, couple_noise, cached)


def check_ids(draft: Any, target: Any) -> None:
    """Check that two tokenizers give the same tokens the same ids."""
    if draft is target:
        return
    ours, theirs = ({i: t for t, i in one.get_vocab().items()} for one in (draft, target))
    different = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
    if different:
        first = different[0]
        raise CheckpointError(
            f"the draft model's token ids are not the target's: id {first} is "
            f"{ours.get(first)!r} for the draft model and {theirs.get(first)!r} for the target; "
            "use a draft model of the same family"
        )


def _other_caches(layers: Sequence[Any]) -> str:
    """Name the caches that drafts do not fit into."""
    return ", ".join(sorted({describe(layer) for layer in layers if type(layer) is not KVCache}))


class ModelDrafting:
    """Drafts of one sequence."""

    reader = None

    def __init__(
        self,
        model: Target,
        vocab_size: int,
        prompt: Sequence[int],
        couple_noise: bool,
        cached: Sequence[Any],
    ):
        self.model = model
        self.num_rows = min(vocab_size, model.vocab_size)
        self.couple_noise = couple_noise
        layers = model.stock_cache(cached or None)
        others = _other_caches(layers)
        if others:
            raise UnsupportedTargetError(
                f"expected KVCache() in the draft model's layers of prompt_cache, found {others}; "
                "leave these layers out, or make them with make_prompt_cache(draft_model)"
            )
        self.cache = DraftCache(layers)
        self._is_shared = bool(cached)
        # Number of entries whose tokens the host knows.
        self.length = self.cache.num_rows
        # Tokens that the host knows and that have no entry yet.
        self._unread = list(prompt)
        # Number of entries beyond the target's; not 0 if a prompt cache held the target's alone.
        self._excess: int | None = None
        # Number of entries of a chain's drafts, after those.
        self._ahead = 0
        # The pass after which the model drafted a tree last. The entries of its tokens exist
        # already, and the host reads their number later.
        self._flight: PendingPass | None = None

    def outlook(self) -> None:
        """Return None, as a network always has something to propose."""

    def propose(self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        self._count_flight(flight)
        levels: LevelScorer
        if plan.shape.width == 1:
            levels = _ChainLevels(self, flight)
        else:
            levels, self._flight, self._ahead = _TreeLevels(self, flight), flight, 0
        return build_tree(search(levels, plan.shape, self.rank(noise)), flight.root, plan)

    def rank(self, noise: GumbelNoise | None) -> Rank | None:
        """Return the function that ranks drafts, given the noise of the target's choices."""
        return ranking(noise if self.couple_noise else None, None)

    def skip(self, flight: PendingPass) -> None:
        self._count_flight(flight)
        self._take(flight.tokens)

    def settle(self, length: int) -> None:
        """Make the entries that are missing, and keep exactly those of the sequence."""
        if not self._is_shared or self._excess is None:
            return
        self._count_flight()
        num_rows = length + self._excess
        self.cache.keep(self.length)
        missing = self._unread[: max(0, num_rows - self.length)]
        for start in range(0, len(missing), READ_STEP_SIZE):
            self.read(missing[start : start + READ_STEP_SIZE])
        self.cache.keep(min(num_rows, self.cache.num_rows))

    def read(self, tokens: Sequence[int]) -> None:
        """Process tokens after the entries that exist; waits for the device."""
        self._forward(mx.array(list(tokens), dtype=mx.int32))
        mx.eval([layer.stock.state for layer in self.cache.layers])

    def read_flight(self, flight: PendingPass) -> mx.array:
        """Process all tokens up to a pass's bonus token; logits after it, shape (1, V)."""
        following = flight.following_tokens
        logits = self._read_unread(following)
        return logits[logits.shape[0] - following.shape[0] + flight.num_accepted]

    def read_level(self, tokens: mx.array, mask: DraftMask, positions: TreePositions) -> mx.array:
        """Process the newest tokens of the beams, (W,), on entries aside; logits, shape (W, V)."""
        self.cache.expect_drafts(mask)
        with tree_positions(positions):
            return self._forward(tokens)

    def read_tokens(self, tokens: Sequence[int]) -> mx.array:
        """Process a pass's tokens, which the host knows; logits after them, shape (1, V)."""
        self._take(tokens)
        return self._read_unread()[-1:]

    def read_known(self) -> None:
        """Process all tokens that the host knows, and forget the entries of drafts aside."""
        self._count_flight()
        if self._unread:
            self._read_unread()
        self.cache.keep(self.cache.num_rows)

    def read_draft(self, token: mx.array) -> mx.array:
        """Process the newest token of a chain, (1,), on an entry behind; logits, shape (1, V)."""
        logits = self._forward(token)
        self._ahead += 1
        # Several writes to one buffer in a graph would copy it each time.
        mx.async_eval(logits)
        return logits

    def _take(self, tokens: Sequence[int]) -> None:
        """Count a pass's tokens: the accepted drafts of a chain have their entries already."""
        num_there = min(self._ahead, len(tokens) - 1)
        self.length += num_there
        self._unread += tokens[num_there:]
        self._ahead = 0

    def _read_unread(self, *following: mx.array) -> mx.array:
        """Process known tokens without an entry, then others; logits after the newest ones."""
        self.cache.keep(self.length)
        while len(self._unread) > READ_STEP_SIZE:
            self.read(self._unread[:READ_STEP_SIZE])
            self.length += READ_STEP_SIZE
            del self._unread[:READ_STEP_SIZE]
        known = mx.array(self._unread, dtype=mx.int32)
        self.length += len(self._unread)
        self._unread = []
        return self._forward(mx.concatenate([known, *following]))

    def _forward(self, tokens: mx.array) -> mx.array:
        return self.model.model(tokens[None], cache=self.cache.layers)[0]

    def _count_flight(self, following: PendingPass | None = None) -> None:
        if self._flight is not None:
            self.length += len(self._flight.tokens)
            self._flight = None
        if following is not None:  # its root is the newest token that the host knows
            self._excess = self.length + len(self._unread) - (following.length + 1)


class DraftLevels:
    """A draft model after one root; a `LevelScorer`. Rows of its head are token ids."""

    def __init__(self, drafting: ModelDrafting):
        self.drafting = drafting
        self.num_rows = drafting.num_rows

    def to_token_ids(self, rows: mx.array) -> mx.array:
        return rows.astype(mx.int32)


class _ChainLevels(DraftLevels):
    """A draft model that drafts a chain; the host waits for the pass."""

    def __init__(self, drafting: ModelDrafting, flight: PendingPass):
        super().__init__(drafting)
        self.flight = flight

    def first(self) -> mx.array:
        return log_probs(self.drafting.read_tokens(self.flight.tokens), self.num_rows)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        return log_probs(self.drafting.read_draft(tokens), self.num_rows)


class _TreeLevels(DraftLevels):
    """A draft model that drafts a tree, each level in one pass."""

    def __init__(self, drafting: ModelDrafting, flight: PendingPass):
        super().__init__(drafting)
        self.flight = flight

    def first(self) -> mx.array:
        logits = self.drafting.read_flight(self.flight)
        length = self.drafting.length
        root = length + self.flight.num_accepted
        self._lineage = DraftLineage(length, root, self.drafting.cache.num_rows)
        return log_probs(logits, self.num_rows)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        logits = self.drafting.read_level(
            tokens, *self._lineage.extend(beams, tokens.shape[0], depth)
        )
        return log_probs(logits, self.num_rows)
