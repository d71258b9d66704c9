"""Drafts of one sequence by a network with K/V entries of its own.

Axes: n tokens, L tokens of an accepted path, S width of the target's states, H hidden size.

Entry t belongs to the state after token t and to token t + 1. Entries of committed tokens come
from the target's states. Those of drafts come from the network's own output and stay aside. After
a pass, one pass of L rows reads the accepted path, and only the device knows how many of them
count. Entries beyond are junk that no query sees, until later ones overwrite it. So rolling back
sets an offset, and the host reads nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import mlx.core as mx

from mlx_redrafter.decoding.records import PendingPass
from mlx_redrafter.decoding.sampling import GumbelNoise
from mlx_redrafter.draft_plan import DraftPlan, DraftShape
from mlx_redrafter.proposers.expansion import Expansion, build_tree
from mlx_redrafter.proposers.kv_network import KvNetwork
from mlx_redrafter.proposers.scores import NoiseRank, ranking
from mlx_redrafter.target.caches.draft_cache import DraftCache, DraftMask
from mlx_redrafter.target.caches.prompt_cache import check_prompt_cache
from mlx_redrafter.target.hooks import TreePositions, tree_positions
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree

# Maximum number of tokens per pass while a drafter reads what it has not seen yet.
READ_STEP_SIZE = 512

N = TypeVar("N", bound=KvNetwork)


class KvDrafting(ABC, Generic[N]):
    """Drafts of one sequence, and the `StateReader` that they need.

    A prompt cache holds no states, so it lacks the pair of its last token and of the first one
    that follows, and the entries after that pair stand one position earlier.
    """

    def __init__(
        self,
        network: N,
        target: Target,
        prompt: Sequence[int],
        couple_noise: bool,
        cached: Sequence[Any],
    ):
        network.hook()
        self.network = network
        self.target = target
        self.layers = network.captured_layers(target)
        self.couple_noise = couple_noise
        self.cache = DraftCache(_stock_cache(network, target, cached))
        self._is_shared = bool(cached)
        # Prompt tokens that are in no pair yet.
        self._following = list(prompt[1:])
        # Number of entries whose tokens the host knows.
        self.length = self.cache.num_rows
        # Pairs that the host knows and that have no entry yet.
        self._unread: list[tuple[mx.array, mx.array]] = []
        # Number of entries beyond the pairs of the target's tokens; not 0 after a prompt cache.
        self._excess: int | None = None
        # The pass after which the network drafted last. The entries of its tokens exist already,
        # and the host reads their number later.
        self._flight: PendingPass | None = None

    @property
    def reader(self) -> KvDrafting[N]:
        return self

    def outlook(self) -> None:
        """Return None, as a network always has something to propose."""

    def read(self, states: mx.array) -> None:
        """Make the entries of prompt tokens from their states; waits for the device."""
        num_tokens = states.shape[0]
        tokens = mx.array(self._following[:num_tokens], dtype=mx.int32)
        del self._following[:num_tokens]
        self._unread.append((states, tokens))
        self._read_unread()

    def propose(self, flight: PendingPass, plan: DraftPlan, noise: GumbelNoise | None) -> TokenTree:
        self._count_flight(flight)
        network = self.network
        rank = ranking(
            noise if self.couple_noise else None, network.row_ids, network.coupling_weight
        )
        expansion = self.expand(flight, plan.shape, rank)
        self._flight = flight
        return build_tree(expansion, flight.root, plan)

    @abstractmethod
    def expand(self, flight: PendingPass, shape: DraftShape, rank: NoiseRank | None) -> Expansion:
        """Score continuations of the bonus token of a pass, which `read_flight` processes.

        The other arguments and the result are those of `search`.
        """

    def skip(self, flight: PendingPass) -> None:
        self._count_flight(flight)
        tokens = flight.tokens
        states = flight.path_states[: len(tokens)]
        mx.async_eval(states)  # these are kept, and those of the other nodes freed
        self._unread.append((states, mx.array(tokens, dtype=mx.int32)))
        if self._num_unread >= READ_STEP_SIZE:
            self._read_unread()

    def settle(self, length: int) -> None:
        """Make the entries that are missing, and keep exactly those of the sequence."""
        if not self._is_shared or self._excess is None:
            return
        self._count_flight()
        if self._unread:
            self._read_unread()
        self.cache.keep(min(length - 1 + self._excess, self.length))

    def read_flight(self, flight: PendingPass) -> mx.array:
        """Process all pairs up to the one of a pass's bonus token; its output, shape (1, H)."""
        num_known = self._num_unread
        self._unread.append((flight.path_states, flight.following_tokens))
        outputs = self._read_pairs()
        self.length += num_known
        return outputs[num_known + flight.num_accepted]

    def read_level(
        self, features: mx.array, tokens: mx.array, mask: DraftMask, positions: TreePositions
    ) -> mx.array:
        """Process the newest tokens of the beams, (W,), on entries aside; outputs, shape (W, H)."""
        self.cache.expect_drafts(mask)
        with tree_positions(positions):
            return self.forward(features, tokens)

    @property
    def _num_unread(self) -> int:
        return sum(tokens.shape[0] for _, tokens in self._unread)

    def _read_unread(self) -> None:
        """Make the entries of known pairs; waits for the device."""
        num_unread = self._num_unread
        self._read_pairs()
        self.length += num_unread
        mx.eval([layer.stock.state for layer in self.cache.layers])

    def _read_pairs(self) -> mx.array:
        """Process pairs without an entry in one pass; outputs, shape (n, H)."""
        self.cache.keep(self.length)
        states, tokens = (mx.concatenate(list(parts)) for parts in zip(*self._unread, strict=True))
        self._unread = []
        return self.forward(self.network.fuse(states), tokens)

    def forward(self, features: mx.array, tokens: mx.array) -> mx.array:
        """Process features and tokens after the entries in the cache; outputs, shape (n, H)."""
        return self.network(features, self.network.embed(tokens, self.target), self.cache.layers)

    def _count_flight(self, following: PendingPass | None = None) -> None:
        if self._flight is not None:
            self.length += len(self._flight.tokens)
            self._flight = None
        if following is not None:  # the newest pair is that of its root
            self._excess = self.length + self._num_unread - following.length


def _stock_cache(network: KvNetwork, target: Target, cached: Sequence[Any]) -> list[Any]:
    """Check the caller's caches, or make new ones."""
    own: list[Any] = network.make_cache()
    if not cached:
        return own
    row = target.embed(mx.array([0]))
    network(row, row, own)  # never computed: it sets the shapes of the entries
    check_prompt_cache(cached, own)
    return list(cached)
