"""Networks that draft from states of the target, with K/V rows of their own.

Axes: n tokens, L tokens of an accepted path, W beams, S width of the target's states, H hidden
size, V rows of the head.

Row t is that of the state after token t and of token t + 1. Rows of committed tokens come from the
target's states, those of drafts from what the network feeds back, which stay aside. After a pass
the accepted path is read in one pass of L rows, of which the device knows how many count; what is
beyond is junk that nobody sees, and is overwritten. So rolling back is setting an offset, and the
host reads nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.proposers.draft_model import COUPLING_WEIGHT, READ_STEP_SIZE, log_probs
from mlx_redrafter.proposers.expansion import Expansion, build_tree
from mlx_redrafter.proposers.kv_network import AutoregressiveNetwork, KvNetwork
from mlx_redrafter.proposers.search import Rank, search
from mlx_redrafter.target.caches.draft_cache import (
    DraftCache,
    DraftLineage,
    DraftMask,
    hook_attention,
)
from mlx_redrafter.target.caches.prompt_cache import check_prompt_cache
from mlx_redrafter.target.hooks import TreePositions, tree_positions
from mlx_redrafter.target.inspection import hook_positions
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree


class KvProposer(ABC):
    """Such a network among the proposers; see `Proposer`.

    Args:
        network: The network, whose attention and rotary embeddings are hooked.

    Raises:
        UnsupportedTargetError: It has rotary embeddings of an unknown kind.
    """

    def __init__(self, network: KvNetwork):
        self.network = network
        hook_attention(network)
        hook_positions(network)

    @property
    def max_length(self) -> int | None:
        """See `Proposer.max_length`."""
        return None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """See `Proposer.modules`."""
        return (self.network,)

    @property
    def num_layers(self) -> int:
        """See `Proposer.num_layers`."""
        return self.network.num_layers

    @property
    def num_rows(self) -> int:
        """See `Proposer.num_rows`."""
        return self.network.num_rows

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """See `Proposer.check_fit`."""
        self.network.check_fit(target, tokenizer)
        target.watch(self.network.captured_layers(target))

    @abstractmethod
    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> KvDrafting:
        """See `Proposer.open`."""


class KvDrafting(ABC):
    """One text's drafts; see `Drafting` and `StateReader`.

    A prompt cache holds no states, so the pair of its last token and of the first one that follows
    is left out, and the rows after it stand one position earlier.

    Args:
        network: The network.
        target: The model whose text it is.
        prompt: Token ids of the prompt.
        couple_noise: Whether drafts are ranked with the target's noise.
        cached: mlx-lm caches to continue, [] for new ones.
    """

    def __init__(
        self,
        network: KvNetwork,
        target: Target,
        prompt: Sequence[int],
        couple_noise: bool,
        cached: Sequence[Any],
    ):
        self.network = network
        self.target = target
        self.layers = network.captured_layers(target)
        self.couple_noise = couple_noise
        self.cache = DraftCache(_stock_cache(network, target, cached))
        self._is_shared = bool(cached)
        # Prompt tokens that no pair has yet.
        self._following = list(prompt[1:])
        # Rows whose tokens the host knows, and known pairs without a row.
        self.length = self.cache.num_rows
        self._unread: list[tuple[mx.array, mx.array]] = []
        # Rows here beyond the pairs of the target's tokens; other than 0 after a prompt cache.
        self._excess: int | None = None
        # A pass after which was drafted: the rows of its tokens are there, the host learns later
        # how many they are.
        self._flight: PendingPass | None = None

    @property
    def reader(self) -> KvDrafting:
        """See `Drafting.reader`."""
        return self

    def outlook(self) -> None:  # noqa: B027
        """See `Drafting.outlook`."""

    def read(self, states: mx.array) -> None:
        """See `StateReader.read`; waits for the device."""
        num_tokens = states.shape[0]
        tokens = mx.array(self._following[:num_tokens], dtype=mx.int32)
        del self._following[:num_tokens]
        self._unread.append((states, tokens))
        self._read_unread()

    def propose(self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        """See `Drafting.propose`."""
        self._count_flight(flight)
        rank = None
        if noise is not None and self.couple_noise:
            rank = partial(noise.rank, token_ids=self.network.row_ids, weight=COUPLING_WEIGHT)
        expansion = self.expand(flight, plan.shape, rank)
        self._flight = flight
        return build_tree(expansion, flight.root, plan)

    @abstractmethod
    def expand(self, flight: PendingPass, shape: DraftShape, rank: Rank | None) -> Expansion:
        """Score continuations of the bonus token of a pass, which `read_flight` processes.

        Arguments and result are those of `search`.
        """

    def skip(self, flight: PendingPass) -> None:
        """See `Drafting.skip`."""
        self._count_flight(flight)
        tokens = flight.tokens
        states = flight.path_states[: len(tokens)]
        mx.async_eval(states)  # of all nodes, these are kept
        self._unread.append((states, mx.array(tokens, dtype=mx.int32)))
        if self._num_unread >= READ_STEP_SIZE:
            self._read_unread()

    def settle(self, length: int) -> None:
        """See `Drafting.settle`; the network reads what it has not."""
        if not self._is_shared or self._excess is None:
            return
        self._count_flight()
        if self._unread:
            self._read_unread()
        self.cache.keep(min(length - 1 + self._excess, self.length))

    def read_flight(self, flight: PendingPass) -> mx.array:
        """Process all pairs up to that of a pass's bonus token; output of this, shape (1, H)."""
        num_known = self._num_unread
        self._unread.append((flight.path_states, flight.following_tokens))
        outputs = self._read_pairs()
        self.length += num_known
        return outputs[num_known + flight.num_accepted]

    @property
    def _num_unread(self) -> int:
        return sum(tokens.shape[0] for _, tokens in self._unread)

    def _read_unread(self) -> None:
        """Give known pairs their rows; waits for the device."""
        num_unread = self._num_unread
        self._read_pairs()
        self.length += num_unread
        mx.eval([layer.stock.state for layer in self.cache.layers])

    def _read_pairs(self) -> mx.array:
        """Process pairs without a row in one pass; outputs, shape (n, H)."""
        self.cache.keep(self.length)
        states, tokens = (mx.concatenate(list(parts)) for parts in zip(*self._unread, strict=True))
        self._unread = []
        return self._forward(self.network.fuse(states), tokens)

    def _forward(self, features: mx.array, tokens: mx.array) -> mx.array:
        return self.network(features, self.target.embed(tokens), self.cache.layers)

    def _count_flight(self, following: PendingPass | None = None) -> None:
        if self._flight is not None:
            self.length += len(self._flight.tokens)
            self._flight = None
        if following is not None:  # the newest pair is that of its root
            self._excess = self.length + self._num_unread - following.length


class AutoregressiveProposer(KvProposer):
    """A network that drafts a token at a time."""

    network: AutoregressiveNetwork

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> AutoregressiveDrafting:
        """See `Proposer.open`."""
        return AutoregressiveDrafting(self.network, target, prompt, couple_noise, cached)


class AutoregressiveDrafting(KvDrafting):
    """One text's drafts by such a network."""

    network: AutoregressiveNetwork

    def expand(self, flight: PendingPass, shape: DraftShape, rank: Rank | None) -> Expansion:
        """See `KvDrafting.expand`."""
        return search(_Levels(self, flight), shape, rank)

    def read_level(
        self, features: mx.array, tokens: mx.array, mask: DraftMask, positions: TreePositions
    ) -> mx.array:
        """Process the newest tokens of the beams, (W,), on rows aside; outputs, shape (W, H)."""
        self.cache.expect_drafts(mask)
        with tree_positions(positions):
            return self._forward(features, tokens)


class _Levels:
    """The network after one root; see `LevelScorer`."""

    def __init__(self, drafting: AutoregressiveDrafting, flight: PendingPass):
        self.drafting = drafting
        self.network = drafting.network
        self.flight = flight

    @property
    def num_rows(self) -> int:
        """See `LevelScorer.num_rows`."""
        return self.network.num_rows

    def first(self) -> mx.array:
        """See `LevelScorer.first`."""
        self._outputs = self.drafting.read_flight(self.flight)
        length = self.drafting.length
        root = length + self.flight.num_accepted
        self._lineage = DraftLineage(length, root, self.drafting.cache.num_rows)
        return self._log_probs()

    def following(self, beams: mx.array | None, tokens: mx.array, depth: int) -> mx.array:
        """See `LevelScorer.following`; the beams of the first level share the root's output."""
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

    def to_token_ids(self, rows: mx.array) -> mx.array:
        """See `LevelScorer.to_token_ids`."""
        ids = self.network.row_ids
        return (rows if ids is None else ids[rows]).astype(mx.int32)

    def _log_probs(self) -> mx.array:
        logits = self.network.logits(self._outputs, self.drafting.target)
        return log_probs(logits, self.num_rows)


def _stock_cache(network: KvNetwork, target: Target, cached: Sequence[Any]) -> list[Any]:
    """The caller's caches, checked, or new ones.

    Raises:
        ConfigError: They are another network's, or do not hold one text.
        UnsupportedTargetError: They are of another kind.
    """
    own: list[Any] = network.make_cache()
    if not cached:
        return own
    row = target.embed(mx.array([0]))
    network(row, row, own)  # never computed: it tells the shapes of rows
    check_prompt_cache(cached, own)
    return list(cached)
