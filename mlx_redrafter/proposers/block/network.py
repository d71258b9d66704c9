"""The network of DFlash, DFlash 2 and DSpark.

Axes: R sequences, n tokens, H hidden size, S width of the target's states, B entries of a block, V
rows of the head.

With ``s`` the target's states and ``c = hidden_norm(fc(s))``, every layer keeps keys and values of
``c`` for verified tokens. A block consists of the newest token, the root, and B - 1 masks:

    x = x + o(attention(q(u), [k(c), k(u)], [v(c), v(u)])),  u = norm(x);   x = x + mlp(norm(x))
    h = norm(x);   unary = head(h)

Each entry predicts for a depth of its own. A link (`layers.py`) adds what depends on the draft
before; nothing else does.

Sources: z-lab/dflash, deepseek-ai/DeepSpec and vllm-project/speculators, whose parameter names are
kept.
"""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ChunkedKVCache, KVCache

from mlx_redrafter.decoding.passes import Pass, roots_of
from mlx_redrafter.decoding.protocols import Group
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH, DraftShape
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.proposers.block.config import BlockConfig
from mlx_redrafter.proposers.block.layers import (
    BlockLayer,
    MarkovHead,
    Selector,
    Surroundings,
    new_rope,
)
from mlx_redrafter.proposers.block.surroundings import DecodingSurroundings, Surrounding, write
from mlx_redrafter.proposers.kv_drafting import KvDrafting, KvNetwork
from mlx_redrafter.proposers.linked_levels import Link, LinkedLevels
from mlx_redrafter.proposers.search import Expansion, NoiseRank, search_all
from mlx_redrafter.target.target import Target


class BlockNetwork(KvNetwork):
    """A network that drafts a block of tokens in one pass."""

    config: BlockConfig
    has_own_attention = True

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.num_layers, self.max_length = config.num_hidden_layers, 1 + config.num_drafts
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if config.has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(len(config.captured_layers) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = [BlockLayer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(hidden, eps=eps)
        if config.has_head:
            self.lm_head = nn.Linear(hidden, config.head_rows, bias=False)
        if config.link == "selector":
            self.candidate_selector = Selector(config)
        elif config.link != "none":
            self.markov_head = MarkovHead(config)
        if config.has_confidence:
            reads = config.rank if config.confidence_reads_token else 0
            self.confidence_head = {"proj": nn.Linear(hidden + reads, 1)}

    @property
    def num_rows(self) -> int:
        return self.config.num_candidates or self.config.head_rows

    @property
    def dtype(self) -> mx.Dtype:
        return self.hidden_norm.weight.dtype

    @property
    def link(self) -> Link | None:
        return self.get("candidate_selector", self.get("markov_head"))

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        needed, count = self.config.num_target_layers, len(target.modules.layers)
        if needed not in (None, count):
            raise CheckpointError(
                f"expected a model of {needed} layers, which the drafter was trained for, found "
                f"one of {count}; use a drafter trained for this model"
            )
        super().check_fit(target, tokenizer)
        if not self.config.has_head:
            # Refuses one without a plain head.
            target.modules.project(mx.zeros((1, target.hidden_size)))
        if not self.config.has_embedding:
            target.modules.embed_input(mx.array([0]))  # refuses one that does more than to scale it

    def become(self, config: BlockConfig) -> None:
        """Read the same weights by another config of the same sizes; copies stay as they are."""
        self.config, self.max_length, layers = config, 1 + config.num_drafts, []
        for layer in self.layers:
            layer, attention = copy.copy(layer), copy.copy(layer.self_attn)
            attention.config, attention.rope = config, new_rope(config)
            layer.self_attn = attention
            layers.append(layer)
        self.layers = layers

    def hook(self) -> None:
        """Leave the layers as they are: they never run on trees."""

    def make_cache(self) -> list[KVCache | ChunkedKVCache]:  # type: ignore[override]
        """Make new caches for its layers; those of windows drop entries that none needs."""
        # A sequence may end anywhere in the newest accepted path.
        return [
            KVCache() if window is None else ChunkedKVCache(window + MAX_BEAM_LENGTH)
            for window in self.config.windows
        ]

    def fuse(self, states: mx.array) -> mx.array:
        return self.hidden_norm(self.fc(states.astype(self.dtype)))

    def __call__(self, features: mx.array, embeddings: mx.array, caches: Sequence[Any]) -> mx.array:
        """Keep keys and values of verified tokens; the network does not read the embeddings."""
        for layer, cache in zip(self.layers, caches, strict=True):
            stock = getattr(cache, "stock", cache)
            write(stock, *layer.self_attn.keys_values(features[None], stock.offset))
        return features

    def block_size(self, levels: int) -> int:
        """Return the number of entries that predict so many levels.

        Where all layers are causal, no entry depends on later ones.
        """
        enough = self.config.first_slot + levels
        return enough if all(self.config.causal) else self.config.block_size

    def embed(self, tokens: mx.array, target: Target) -> mx.array:
        """Embed the tokens of blocks, ids of shape (n,) to shape (n, H)."""
        if self.config.has_embedding:
            rows = self.embed_tokens(tokens)
        else:
            rows = target.modules.embed_input(tokens, normed=not self.config.skips_embedding_norm)
        if self.config.embed_scale != 1:
            rows = rows * self.config.embed_scale
        return rows.astype(self.dtype)

    def embed_blocks(self, roots: mx.array, size: int, target: Target) -> mx.array:
        """Embed blocks of a root and masks each, ids of shape (M,) to shape (M, B, H)."""
        masks = mx.full((len(roots), size - 1), self.config.mask_token_id, dtype=mx.int32)
        tokens = mx.concatenate([roots.astype(mx.int32)[:, None], masks], axis=1)
        return self.embed(tokens.flatten(), target).reshape(*tokens.shape, -1)

    def outputs(self, embeddings: mx.array, around: Surroundings) -> mx.array:
        """Process blocks, shape (M, B, H) to (M, B, H), after the final norm."""
        x = embeddings
        for layer in self.layers:
            x = layer(x, around)
        return self.norm(x)

    def logits(self, outputs: mx.array, target: Target) -> mx.array:
        """Compute logits before any link, float32, shape (n, H) to (n, V)."""
        if self.config.has_head:
            found = self.lm_head(outputs)
        else:
            found = target.modules.project(outputs)
        found = found[:, : self.config.head_rows].astype(mx.float32)
        if self.config.output_multiplier != 1:
            found = found * self.config.output_multiplier
        cap = self.config.softcap
        return found if cap is None else mx.tanh(found / cap) * cap

    def confidences(self, outputs: mx.array, previous: mx.array) -> mx.array:
        """Estimate natural log-probabilities that the target accepts the best drafts.

        ``outputs`` are those of a depth, one row for all tokens or one for each, shape (..., H),
        and ``previous`` the tokens before the drafts, int32, shape (...). float32, shape (..., 1).
        """
        x = mx.broadcast_to(outputs, (*previous.shape, outputs.shape[-1]))
        if self.config.confidence_reads_token:
            x = mx.concatenate([x, self.markov_head.markov_w1(previous)], axis=-1)
        return nn.log_sigmoid(self.confidence_head["proj"](x).astype(mx.float32))

    def scales(self, levels: int, rank: NoiseRank | None) -> mx.array | None:
        """Return the factor on the logits of each depth, float32, shape (levels,), or None for 1.

        The noise of a sampling target makes its choices as uncertain as the network's
        probabilities say, so the factors apply only if no noise ranks.
        """
        if rank is not None:
            return None
        config = self.config
        return mx.array((config.depth_scales or [config.inverse_temperature] * levels)[:levels])

    def expand(self, group: Group, shape: DraftShape, rank: NoiseRank | None) -> Expansion:
        levels, outputs = shape.levels, self.read_blocks(group, shape.levels)
        unary = self.logits(outputs.reshape(-1, outputs.shape[-1]), group[0][0].target)
        is_chain = shape.width == 1 and rank is None
        count = self.config.num_candidates
        if self.link is None and not is_chain:
            count = shape.level_nodes  # a depth has the same best tokens after every draft
        # The confidence head scores drafts until they are calibrated. With one factor per depth,
        # trees of 16 had 2.67 tokens/step without it and 2.64 with it; of a drafter with logits
        # that are too flat, 2.00 and 2.54.
        is_trusted = self.config.has_confidence and self.config.depth_scales is None
        linked = LinkedLevels(
            self.link,
            outputs,
            unary.reshape(len(outputs), levels, -1),
            roots_of([flight for _, flight in group]),
            self.scales(levels, rank),
            rank,
            count,
            self.to_token_ids,
            self.confidences if is_trusted else None,
        )
        return linked.chain() if is_chain else search_all(linked, shape)

    def read_blocks(self, group: Group, levels: int) -> mx.array:
        """Process a block after a pass of each sequence, all in one pass; shape (R, levels, H)."""
        size, slot = self.block_size(levels), self.config.first_slot
        parts = [self.surround(drafting, flight) for drafting, flight in group]
        roots = roots_of([flight for _, flight in group])
        blocks = self.embed_blocks(roots, size, group[0][0].target)
        return self.outputs(blocks, DecodingSurroundings(parts, size))[:, slot : slot + levels]

    def surround(self, drafting: KvDrafting, flight: Pass) -> Surrounding:
        """Return what a block after a pass attends to; its states enter with the block."""
        first, num_known = drafting.length, drafting.num_unread
        states, _ = drafting.take_pairs(flight)
        drafting.length += num_known
        length, caches = drafting.length, [layer.stock for layer in drafting.cache.layers]
        return Surrounding(caches, self.fuse(states), first, length, length + flight.num_accepted)
