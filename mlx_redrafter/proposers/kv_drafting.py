"""Networks with K/V entries of their own that draft from states of the target, and their drafts.

Axes: R sequences, W beams of each, n tokens, S width of the target's states, H hidden size, V rows
of the head.

Entry t belongs to the state after token t and to token t + 1. Entries of committed tokens come
from the target's states. Those of drafts come from the network's own output and stay aside.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import Group
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.draft_network import READ_STEP_SIZE, CachedDrafting, DraftNetwork
from mlx_redrafter.proposers.search import Expansion, NoiseRank, log_probs, search_all
from mlx_redrafter.target.caches.draft_cache import (
    DraftCache,
    DraftLayer,
    DraftMask,
    attend_to_drafts,
)
from mlx_redrafter.target.caches.prompt_cache import check_prompt_cache
from mlx_redrafter.target.hooks import Call, TreePositions, install_in_attention, tree_positions
from mlx_redrafter.target.model_parts import hook_positions
from mlx_redrafter.target.target import Target


class KvNetwork(DraftNetwork):
    """A network that drafts from pairs: a state of the target, and the token that came after it.

    Its layers attend to all pairs before, with mlx-lm's attention and rotary embeddings.
    """

    # True if its layers have an attention of their own instead.
    has_own_attention: ClassVar[bool] = False

    def captured_layers(self, target: Target) -> Sequence[int]:
        """Return the layers of the target whose inputs it reads, and `target.FINAL`."""
        return self.config.captured_layers

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> KvDrafting:
        return KvDrafting(self, target, prompt, couple_noise, cached)

    def fuse(self, states: mx.array) -> mx.array:
        """Compute features from the target's states, shape (n, S) to (n, H)."""
        return states

    def embed(self, tokens: mx.array, target: Target) -> mx.array:
        """Look up the embeddings of tokens, shape (n,) to (n, H): the target's, or its own."""
        return target.modules.embed(tokens)

    @abstractmethod
    def __call__(self, features: mx.array, embeddings: mx.array, caches: Sequence[Any]) -> mx.array:
        """Process pairs after those in the caches of its layers; outputs, shape (n, H).

        ``features`` are rows of `fuse` or `AutoregressiveNetwork.feed_back`, ``embeddings`` of
        `embed`, both of shape (n, H). The caches' ``make_mask`` decides what the pairs see.
        """

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        super().check_fit(target, tokenizer)
        self.hook()
        target.modules.watch(self.captured_layers(target))

    def hook(self) -> None:
        """Let the layers work on trees: their attention, and their rotary embeddings."""
        install_in_attention(self, attend_to_drafts)
        hook_positions(self)

    def make_cache(self) -> list[KVCache]:
        """Make new caches for its layers; mlx-lm's ``make_prompt_cache`` calls this."""
        return [KVCache() for _ in range(self.num_layers)]


class KvDrafting(CachedDrafting):
    """Drafts of one sequence, and the `StateReader` that they need.

    A prompt cache holds no states, so it lacks the pair of its last token and of the first one
    that follows, and the entries after that pair stand one position earlier.
    """

    num_without_entry: ClassVar[int] = 1

    def __init__(
        self,
        network: KvNetwork,
        target: Target,
        prompt: Sequence[int],
        couple_noise: bool,
        cached: Sequence[Any],
    ):
        network.hook()
        self.network, self.target = network, target
        self.layers = network.captured_layers(target)
        super().__init__(network, couple_noise, self._stock_cache(cached), bool(cached))
        # Prompt tokens that are in no pair yet.
        self._following = list(prompt[1:])
        # Pairs that the host knows and that have no entry yet.
        self._unread: list[tuple[mx.array, mx.array]] = []

    @property
    def reader(self) -> KvDrafting:
        return self

    @property
    def is_joint(self) -> bool:
        # The last pass has shown that of mlx-lm's attention.
        is_plain = all(layer.is_plain for layer in self.cache.layers)
        return super().is_joint and (self.network.has_own_attention or is_plain)

    @property
    def num_unread(self) -> int:
        return sum(tokens.shape[0] for _, tokens in self._unread)

    def read(self, states: mx.array) -> None:
        """Make the entries of prompt tokens from their states; waits for the device."""
        num_tokens = states.shape[0]
        tokens = mx.array(self._following[:num_tokens], dtype=mx.int32)
        del self._following[:num_tokens]
        self._unread.append((states, tokens))
        self.read_unread()

    def note(self, flight: Pass) -> None:
        tokens = list(flight.tokens)
        states = flight.path_states[: len(tokens)]
        mx.async_eval(states)  # these are kept, and those of the other nodes freed
        self._unread.append((states, mx.array(tokens, dtype=mx.int32)))
        if self.num_unread >= READ_STEP_SIZE:
            self.read_unread()

    def process_unread(self, flight: Pass | None = None) -> mx.array:
        num_unread = self.num_unread
        outputs = self.process(*self.take_pairs(flight), self.cache.layers)
        self.length += num_unread
        return outputs

    def read_level(
        self, features: mx.array, tokens: mx.array, mask: DraftMask, positions: TreePositions
    ) -> mx.array:
        """Process the newest tokens of the beams, (W,), on entries aside; outputs, shape (W, H)."""
        self.cache.expect_drafts(mask)
        with tree_positions(positions):
            embeddings = self.network.embed(tokens, self.target)
            return self.network(features, embeddings, self.cache.layers)

    def take_pairs(self, flight: Pass | None) -> tuple[mx.array, mx.array]:
        """Return the pairs without an entry, which the next pass processes: states and tokens.

        The pairs of a ``flight`` come after those that the host knows.
        """
        self.cache.keep(self.length)
        unread, self._unread = self._unread, []
        if flight is not None:
            unread.append((flight.path_states, flight.following_tokens))
        states, tokens = (mx.concatenate(list(parts)) for parts in zip(*unread, strict=True))
        return states, tokens

    def process(self, states: mx.array, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Process pairs after the entries in some caches; outputs, shape (n, H)."""
        network = self.network
        return network(network.fuse(states), network.embed(tokens, self.target), caches)

    def _stock_cache(self, cached: Sequence[Any]) -> list[Any]:
        own: list[Any] = self.network.make_cache()
        if not cached:
            return own
        states = mx.zeros((1, self.target.hidden_size * len(self.layers)))
        self.process(states, mx.array([0]), own)  # never computed: it sets the shapes of entries
        check_prompt_cache(cached, own)
        return list(cached)


def read_flights(group: Group) -> mx.array:
    """Do what `KvDrafting.read_flight` does for several sequences in one pass; shape (R, H)."""
    first, flight = group[0]
    if len(group) == 1:
        return first.read_flight(flight)
    draftings = [one for one, _ in group]
    known = [one.num_unread for one in draftings]
    pairs = [one.take_pairs(flight) for one, flight in group]
    states, tokens = (mx.concatenate(list(parts)) for parts in zip(*pairs, strict=True))
    sizes = [rows.shape[0] for _, rows in pairs]
    spans = [
        range(one.length, one.length + size) for one, size in zip(draftings, sizes, strict=True)
    ]
    nodes = mx.array([list(chain(*spans))], dtype=mx.int32)
    with tree_positions(TreePositions(nodes, spans)):
        layers = _joint_layers([one.cache for one in draftings], sizes)
        outputs = first.process(states, tokens, layers)
    places, start = [], 0
    for (one, flight), count, size in zip(group, known, sizes, strict=True):
        places.append(start + count + flight.num_accepted)
        start += size
        one.length += count
    return outputs[mx.concatenate(places)]


def read_levels(
    draftings: Sequence[KvDrafting],
    features: mx.array,
    tokens: mx.array,
    levels: Sequence[tuple[DraftMask, TreePositions]],
) -> mx.array:
    """Do what `KvDrafting.read_level` does for several sequences in one pass; shape (R W, H)."""
    first = draftings[0]
    if len(draftings) == 1:
        return first.read_level(features, tokens, *levels[0])
    for one, (mask, _) in zip(draftings, levels, strict=True):
        one.cache.expect_drafts(mask)
    sizes = [tokens.shape[0] // len(draftings)] * len(draftings)
    nodes = mx.concatenate([positions.nodes for _, positions in levels], axis=1)
    spans = [span for _, positions in levels for span in positions.known]
    with tree_positions(TreePositions(nodes, spans)):
        embeddings = first.network.embed(tokens, first.target)
        layers = _joint_layers([one.cache for one in draftings], sizes)
        outputs: mx.array = first.network(features, embeddings, layers)
    return outputs


class JointLayer(DraftLayer):
    """One layer's caches of several sequences, for one pass over the rows of all of them.

    The matrices of the network see all rows at once. Each sequence attends to its own entries.
    """

    def __init__(self, layers: Sequence[DraftLayer], sizes: Sequence[int]):
        self._layers = layers
        self._sizes = sizes
        self._ends = list(accumulate(sizes))[:-1]
        self._entries: list[tuple[mx.array, mx.array]] = []

    @property
    def offset(self) -> int:
        # Rotary embeddings use `TreePositions` instead.
        return max(layer.offset for layer in self._layers)

    def make_mask(  # type: ignore[override]
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> list[Any]:
        # The network hands them to `attend` as they are.
        return [
            layer.make_mask(size, return_array, window_size)
            for layer, size in zip(self._layers, self._sizes, strict=True)
        ]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        # `attend` finds the entries of each sequence, and the network none.
        parts = (mx.split(rows, self._ends, axis=2) for rows in (keys, values))
        self._entries = [
            layer.update_and_fetch(*pair) for layer, *pair in zip(self._layers, *parts, strict=True)
        ]
        return keys, values

    def attend(
        self, call: Call, *arrays: mx.array, scale: float, mask: Any, **options: Any
    ) -> mx.array:
        queries = mx.split(arrays[0], self._ends, axis=2)
        parts = zip(self._layers, queries, self._entries, mask, strict=True)
        found = [
            layer.attend(call, own, *entries, scale=scale, mask=one, **options)
            for layer, own, entries, one in parts
        ]
        return mx.concatenate(found, axis=2)


def _joint_layers(caches: Sequence[DraftCache], sizes: Sequence[int]) -> list[JointLayer]:
    layers = zip(*(cache.layers for cache in caches), strict=True)
    return [JointLayer(layer, sizes) for layer in layers]


class AutoregressiveNetwork(KvNetwork):
    """A network that drafts a token at a time, and reads its own output for the draft before.

    Such networks are EAGLE heads, MTP modules and Gemma 4 assistants.
    """

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
