"""A smaller model of the same family as the proposer: any supported mlx-lm model of the same ids.

Axes: N nodes of a tree, R roots, W beam width, L beam length, V token ids that both models have, n
tokens.

The state of a text is the K/V rows of its committed tokens. The accepted drafts of a tree are read
again together with the new root, in one pass of L rows of which the device knows how many count;
what is beyond is junk that nobody sees, and is overwritten. So rolling back is setting an offset,
and nothing is read by the host. The drafts of a chain have their rows in the order of the text, so
those accepted stay, as in mlx-lm; the host has to know how many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan
from mlx_redrafter.errors import CheckpointError, UnsupportedTargetError
from mlx_redrafter.proposers.expansion import build_tree
from mlx_redrafter.proposers.search import LevelScorer, Rank, search
from mlx_redrafter.target.caches.cache_kinds import describe
from mlx_redrafter.target.caches.draft_cache import (
    DraftCache,
    DraftLineage,
    DraftMask,
    hook_attention,
)
from mlx_redrafter.target.hooks import TreePositions, tree_positions
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

# Most tokens per forward pass while the model reads what it has not seen yet.
READ_STEP_SIZE = 512
# Weight of the target's noise in the ranking of drafts. All of it: the model's distribution is its
# own, not one that was fitted to greedy choices.
COUPLING_WEIGHT = 1.0


class DraftModel:
    """A draft model among the proposers; see `Proposer`.

    Args:
        model: A supported mlx-lm model.
        tokenizer: Its tokenizer.

    Raises:
        UnsupportedTargetError: Trees of this architecture would not be exact, or the rows of
            drafts do not fit into its caches.
    """

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
    def modules(self) -> tuple[nn.Module, ...]:
        """See `Proposer.modules`."""
        return (self.target.model,)

    @property
    def num_layers(self) -> int:
        """See `Proposer.num_layers`."""
        return self.target.num_layers

    @property
    def num_rows(self) -> int:
        """See `Proposer.num_rows`."""
        return self.target.vocab_size

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """See `Proposer.check_fit`; tokens must have the same ids."""
        check_ids(self.tokenizer, tokenizer)

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> ModelDrafting:
        """See `Proposer.open`."""
        return ModelDrafting(self.target, target.vocab_size, prompt, couple_noise, cached)


def check_ids(draft: Any, target: Any) -> None:
    """Check that two tokenizers give the same tokens the same ids.

    Raises:
        CheckpointError: They do not; the message shows the first difference.
    """
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
    """The caches that drafts do not fit into."""
    return ", ".join(sorted({describe(layer) for layer in layers if type(layer) is not KVCache}))


class ModelDrafting:
    """One text's drafts; see `Drafting`.

    Args:
        model: The draft model.
        vocab_size: Token ids of the target.
        prompt: Token ids of the prompt.
        couple_noise: Whether drafts are ranked with the target's noise.
        cached: mlx-lm caches to continue, [] for new ones.
    """

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
        # Rows whose tokens the host knows, and known tokens without a row.
        self.length = self.cache.num_rows
        self._unread = list(prompt)
        # Rows here beyond those of the target; other than 0 where a cache holds the target's only.
        self._excess: int | None = None
        # Rows of the drafts of a chain, after those.
        self._ahead = 0
        # A pass after which was drafted: the rows of its tokens are there, the host learns later
        # how many they are.
        self._flight: PendingPass | None = None

    def outlook(self) -> None:
        """See `Drafting.outlook`."""

    def propose(self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        """See `Drafting.propose`."""
        self._count_flight(flight)
        levels: LevelScorer
        if plan.shape.width == 1:
            levels = _ChainLevels(self, flight)
        else:
            levels, self._flight, self._ahead = _TreeLevels(self, flight), flight, 0
        return build_tree(search(levels, plan.shape, self.rank(noise)), flight.root, plan)

    def branch(
        self, tree: TokenTree, origin: mx.array | None, noise: GumbelNoise | None
    ) -> _Branches:
        """See `Branching.branch`."""
        return _Branches(self, tree)

    def rank(self, noise: GumbelNoise | None) -> Rank | None:
        """See `Branching.rank`."""
        if noise is None or not self.couple_noise:
            return None
        return partial(noise.rank, token_ids=None, weight=COUPLING_WEIGHT)

    def origin(self, flight: PendingPass) -> None:
        """See `Branching.origin`; the rows of the text are enough."""

    def skip(self, flight: PendingPass) -> None:
        """See `Drafting.skip`."""
        self._count_flight(flight)
        self._take(flight.tokens)

    def settle(self, length: int) -> None:
        """See `Drafting.settle`; the model reads what it has not."""
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
        """Process tokens of the text, after the rows that are there; waits for the device."""
        self._forward(mx.array(list(tokens), dtype=mx.int32))
        mx.eval([layer.stock.state for layer in self.cache.layers])

    def read_flight(self, flight: PendingPass) -> mx.array:
        """Process all tokens up to a pass's bonus token; logits after it, shape (1, V)."""
        self.cache.keep(self.length)
        self._shorten_unread()
        known = mx.array(self._unread, dtype=mx.int32)
        logits = self._forward(mx.concatenate([known, flight.following_tokens]))
        self.length += len(self._unread)
        num_known = len(self._unread)
        self._unread = []
        return logits[num_known + flight.num_accepted]

    def read_level(self, tokens: mx.array, mask: DraftMask, positions: TreePositions) -> mx.array:
        """Process the newest tokens of the beams, (W,), on rows aside; logits, shape (W, V)."""
        self.cache.expect_drafts(mask)
        with tree_positions(positions):
            return self._forward(tokens)

    def read_tokens(self, tokens: Sequence[int]) -> mx.array:
        """Process a pass's tokens, which the host knows; logits after them, shape (1, V)."""
        self._take(tokens)
        self.cache.keep(self.length)
        self._shorten_unread()
        logits = self._forward(mx.array(self._unread, dtype=mx.int32))
        self.length += len(self._unread)
        self._unread = []
        return logits[-1:]

    def read_known(self) -> None:
        """Process all tokens that the host knows, and forget the rows of drafts aside."""
        self._count_flight()
        if self._unread:
            self.cache.keep(self.length)
            self._shorten_unread()
            self._forward(mx.array(self._unread, dtype=mx.int32))
            self.length += len(self._unread)
            self._unread = []
        self.cache.keep(self.cache.num_rows)

    def read_draft(self, token: mx.array) -> mx.array:
        """Process the newest token of a chain, (1,), on a row behind; logits, shape (1, V)."""
        logits = self._forward(token)
        self._ahead += 1
        # Several writes to one buffer in a graph would copy it each time.
        mx.async_eval(logits)
        return logits

    def _take(self, tokens: Sequence[int]) -> None:
        """Learn of a pass's tokens: the accepted drafts of a chain have their rows."""
        num_there = min(self._ahead, len(tokens) - 1)
        self.length += num_there
        self._unread += tokens[num_there:]
        self._ahead = 0

    def _shorten_unread(self) -> None:
        """Process all but the last known tokens without a row."""
        while len(self._unread) > READ_STEP_SIZE:
            self.read(self._unread[:READ_STEP_SIZE])
            self.length += READ_STEP_SIZE
            del self._unread[:READ_STEP_SIZE]

    def _forward(self, tokens: mx.array) -> mx.array:
        return self.model.model(tokens[None], cache=self.cache.layers)[0]

    def _count_flight(self, following: PendingPass | None = None) -> None:
        if self._flight is not None:
            self.length += len(self._flight.tokens)
            self._flight = None
        if following is not None:  # its root is the newest token that the host knows
            self._excess = self.length + len(self._unread) - (following.length + 1)


class _DraftLevels:
    """A draft model after some root; see `LevelScorer`. Both have the same token ids."""

    def __init__(self, drafting: ModelDrafting):
        self.drafting = drafting
        self.num_rows = drafting.num_rows

    def to_token_ids(self, rows: mx.array) -> mx.array:
        """See `LevelScorer.to_token_ids`."""
        return rows.astype(mx.int32)


class _ChainLevels(_DraftLevels):
    """A draft model that drafts a chain; waits for the pass."""

    def __init__(self, drafting: ModelDrafting, flight: PendingPass):
        super().__init__(drafting)
        self.flight = flight

    def first(self) -> mx.array:
        """See `LevelScorer.first`."""
        return log_probs(self.drafting.read_tokens(self.flight.tokens), self.num_rows)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """See `LevelScorer.following`."""
        return log_probs(self.drafting.read_draft(tokens), self.num_rows)


class _TreeLevels(_DraftLevels):
    """A draft model that drafts a tree, each level in one pass."""

    def __init__(self, drafting: ModelDrafting, flight: PendingPass):
        super().__init__(drafting)
        self.flight = flight

    def first(self) -> mx.array:
        """See `LevelScorer.first`."""
        logits = self.drafting.read_flight(self.flight)
        length = self.drafting.length
        root = length + self.flight.num_accepted
        self._lineage = DraftLineage(length, root, self.drafting.cache.num_rows)
        return log_probs(logits, self.num_rows)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """See `LevelScorer.following`."""
        logits = self.drafting.read_level(
            tokens, *self._lineage.extend(beams, tokens.shape[0], depth)
        )
        return log_probs(logits, self.num_rows)


class _Branches(_DraftLevels):
    """A draft model along a tree; see `Branches`. All its nodes stay aside, the root too."""

    def __init__(self, drafting: ModelDrafting, tree: TokenTree):
        super().__init__(drafting)
        self.tree = tree

    def after_nodes(self) -> mx.array:
        """See `Branches.after_nodes`."""
        drafting, tree = self.drafting, self.tree
        drafting.read_known()
        # The row of the tree's root is there, and not seen: its logits are asked for again.
        length = drafting.length - 1
        before = mx.array([length - 1], dtype=mx.int32)
        self._lineage = DraftLineage(length, before, drafting.cache.num_rows)
        tokens = mx.maximum(tree.tokens, 0)  # padding has no token
        return log_probs(
            drafting.read_level(tokens, *self._lineage.start_at_nodes(tree)), self.num_rows
        )

    def begin(self, nodes: mx.array, tokens: mx.array) -> None:
        """See `Branches.begin`."""
        self._nodes, self._tokens = nodes, tokens

    def first(self) -> mx.array:
        """See `LevelScorer.first`."""
        return self._extend(self._nodes, self._tokens, 0)

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """See `LevelScorer.following`."""
        return self._extend(beams, tokens, depth)

    def _extend(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        width, roots = tokens.shape[0], self._nodes.shape[0]
        # What follows a node of depth d stands at d + 2, as the tree's root is at 1.
        depths = mx.repeat(self.tree.depths[self._nodes], width // roots) + (2 + depth)
        level = self._lineage.extend(beams, width, depths, self.tree.max_depth + 2 + depth)
        return log_probs(self.drafting.read_level(tokens, *level), self.num_rows)


def log_probs(logits: mx.array, num_rows: int) -> mx.array:
    """Natural log-probabilities of the first tokens, float32, shape (W, ``num_rows``)."""
    logits = logits[:, :num_rows].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
