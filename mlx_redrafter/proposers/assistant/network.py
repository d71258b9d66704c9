"""The network of Gemma 4 assistants, and its shape as published.

Axes: n tokens, W beams, S committed entries, H hidden size of the target, V tokens.

Sources: transformers' ``gemma4_assistant`` and its ``SinglePositionMultiTokenCandidateGenerator``,
and mlx-vlm's ``gemma4_assistant``, whose parameter names are the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from mlx_redrafter.checks import check_int, check_multiple
from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.errors import CheckpointError, ConfigError, UnsupportedTargetError
from mlx_redrafter.proposers.kv_drafting import AutoregressiveNetwork, KvDrafting
from mlx_redrafter.proposers.layer_sizes import FULL, SLIDING, check_layer_types
from mlx_redrafter.proposers.stored_config import MAX_COUNT, MAX_DIMENSION, reading
from mlx_redrafter.target.caches.draft_cache import DraftMask
from mlx_redrafter.target.hooks import FINAL, TreePositions, tree_positions
from mlx_redrafter.target.target import Target

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
# Sizes in the object text_config.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "sliding_window")
# Entries and a mask of one kind of attention: keys and values, shape (1, G, S, D), bool (S,).
Context = tuple[mx.array, mx.array, mx.array]


@dataclass(frozen=True)
class AssistantConfig:
    """The shape of an assistant, of the sizes of its target.

    Attributes:
        text: Arguments of mlx-lm's layers.
        ties_head: Whether its head is its embedding.
        num_centroids: Number of clusters of tokens; None if every token is scored.
        top_centroids: Number of clusters whose tokens are scored.
        values: The config as published.
    """

    hidden_size: int
    vocab_size: int
    text: Mapping[str, Any] = field(repr=False)
    ties_head: bool
    num_centroids: int | None
    top_centroids: int
    values: Mapping[str, Any] = field(repr=False, compare=False)
    draft_vocab_size: ClassVar[None] = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        text = values.get("text_config")
        if not isinstance(text, Mapping):
            raise CheckpointError(
                "expected an object text_config in the config.json of a Gemma 4 assistant, found "
                "none; download it again"
            )
        is_clustered = values.get("use_ordered_embeddings", False)
        with reading("the assistant's config.json is"):
            _check_text(text)
            return cls(
                hidden_size=values.get("backbone_hidden_size", 0),
                vocab_size=text["vocab_size"],
                text=dict(text),
                ties_head=values.get("tie_word_embeddings", True) is not False,
                num_centroids=values.get("num_centroids", 2048) if is_clustered else None,
                top_centroids=values.get("centroid_intermediate_top_k", 32),
                values=values,
            )

    def __post_init__(self) -> None:
        check_int("backbone_hidden_size", self.hidden_size, 1, MAX_DIMENSION)
        if self.num_centroids is None:
            return
        check_int("num_centroids", self.num_centroids, 1, self.vocab_size)
        check_int("centroid_intermediate_top_k", self.top_centroids, 1, self.num_centroids)
        check_multiple("vocab_size", self.vocab_size, "num_centroids", self.num_centroids)
        if not self.ties_head:
            raise ConfigError("use_ordered_embeddings needs tie_word_embeddings, got a head apart")

    @property
    def summary(self) -> str:
        layers = self.text["num_hidden_layers"]
        return f"Gemma 4 assistant of {layers} layers, hidden_size {self.hidden_size} of its target"

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def _check_text(text: Mapping[str, Any]) -> None:
    for name in (*SIZES, "vocab_size"):
        check_int(name, text.get(name), 1, MAX_DIMENSION)
    check_int("num_hidden_layers", text.get("num_hidden_layers"), 1, MAX_COUNT)
    check_layer_types(text.get("layer_types"), text["num_hidden_layers"])
    for name in ("enable_moe_block", "hidden_size_per_layer_input"):
        if text.get(name):
            raise ConfigError(f"{name} must be absent or 0 in an assistant, got {text[name]!r}")


class Backbone(nn.Module):
    """The embedding of the tokens that the assistant scores, its layers and its final norm."""

    def __init__(self, args: gemma4_text.ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [gemma4_text.DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class Clusters(nn.Module):
    """Centroids of clusters of tokens, and the token ids of one cluster after another."""

    def __init__(self, hidden_size: int, num_centroids: int, vocab_size: int):
        super().__init__()
        self.centroids = nn.Linear(hidden_size, num_centroids, bias=False)
        self.token_ordering = mx.arange(vocab_size, dtype=mx.int32)

    def nearest(self, rows: mx.array, count: int) -> mx.array:
        """Return the tokens of the nearest clusters, int32, shape (W, n)."""
        scores = self.centroids(rows)
        best = mx.argpartition(-scores, kth=count - 1, axis=-1)[:, :count]
        clusters = self.token_ordering.reshape(scores.shape[-1], -1)
        return clusters[best].reshape(rows.shape[0], -1)


class Assistant(AutoregressiveNetwork):
    """An assistant, with ``e`` a token's embedding in the target and ``h`` the state before it:

        x = pre_projection([e, h]);   y = norm(layers(x));   logits = head(y)

    ``h`` is the target's last hidden state, and after drafts ``post_projection(y)``. All drafts
    stand at the position of the first token that the target has no entries of. Layers have queries
    alone: they attend to the entries of the target's last layer of their kind.
    """

    is_joint = False
    num_layers = 2  # of the target, whose entries it keeps

    def __init__(self, config: AssistantConfig):
        super().__init__(config)
        layers = {"num_kv_shared_layers": config.text["num_hidden_layers"]}
        flags = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
        args = gemma4_text.ModelArgs.from_dict({**config.text, **layers, **flags})
        self.model = Backbone(args)
        width = args.hidden_size
        self.pre_projection = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.post_projection = nn.Linear(width, config.hidden_size, bias=False)
        if config.num_centroids is not None:
            self.masked_embedding = Clusters(width, config.num_centroids, config.vocab_size)
        if not config.ties_head:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)

    def captured_layers(self, target: Target) -> Sequence[int]:
        """Return the last layers of each kind that have entries of their own, and `FINAL`."""
        kinds = [
            getattr(block, "layer_type", None)
            for block in target.modules.layers[: target.num_layers]
        ]
        if not {FULL, SLIDING} <= set(kinds):
            raise UnsupportedTargetError(
                f"expected a Gemma 4 target with {FULL} and {SLIDING} layers, found one without; "
                "use another drafter"
            )
        last = {kind: i for i, kind in enumerate(kinds)}
        return last[FULL], last[SLIDING], FINAL

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        super().check_fit(target, tokenizer)
        inputs = mx.zeros((1, target.hidden_size))
        for layer in self.captured_layers(target)[:2]:
            kind = target.modules.layers[layer].layer_type
            # Never computed: their shapes are compared.
            keys, _ = target.modules.entries(layer, inputs, 0)
            for attention in (own.self_attn for own in self.model.layers if own.layer_type == kind):
                if keys.shape[-1] != attention.head_dim or attention.n_heads % keys.shape[1]:
                    raise CheckpointError(
                        f"the assistant's {kind} has {attention.n_heads} heads of size "
                        f"{attention.head_dim}, which do not fit the target's {keys.shape[1]} of "
                        f"size {keys.shape[-1]}; use the assistant of this model"
                    )

    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> AssistantDrafting:
        return AssistantDrafting(self, target, prompt, couple_noise, cached)

    def embed(self, tokens: mx.array, target: Target) -> mx.array:
        return target.modules.embed_input(tokens)

    def __call__(self, features: mx.array, embeddings: mx.array, caches: Sequence[Any]) -> mx.array:
        """Process one token of every beam; outputs, shape (W, width).

        ``features`` are the states before the tokens, shape (W, H), ``embeddings`` what the
        target's first layer gets, (W, H), and ``caches`` the `Context` of full and of sliding
        attention.
        """
        contexts: dict[str, Context] = dict(zip((FULL, SLIDING), caches, strict=True))
        joined = mx.concatenate([embeddings, features], axis=-1)
        x = self.pre_projection(joined.astype(self.model.norm.weight.dtype))[None]
        for layer in self.model.layers:
            keys, values, seen = contexts[layer.layer_type]
            mask = mx.broadcast_to(seen, (x.shape[1], seen.shape[0]))
            x, _, _ = layer(x, mask, shared_kv=(keys, values), offset=0)
        return self.model.norm(x)[0]

    def feed_back(self, outputs: mx.array) -> mx.array:
        return self.post_projection(outputs)

    def logits(self, outputs: mx.array, target: Target) -> mx.array:
        """Compute logits, shape (W, width) to (W, V); -inf for tokens that are not scored."""
        if "lm_head" in self:
            return self.lm_head(outputs)
        if "masked_embedding" not in self:
            return self.model.embed_tokens.as_linear(outputs)
        ids = self.masked_embedding.nearest(outputs, self.config.top_centroids)
        scores = (self.model.embed_tokens(ids) @ outputs[..., None]).squeeze(-1)
        others = mx.full((outputs.shape[0], self.config.vocab_size), -mx.inf, dtype=scores.dtype)
        return mx.put_along_axis(others, ids, scores, axis=-1)


class AssistantDrafting(KvDrafting):
    """Drafts of one sequence by an assistant, on a copy of the entries that it attends to.

    The copy holds them in the order of tokens, whatever the target's caches do with theirs.
    """

    def process(self, states: mx.array, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Copy the entries of the tokens that the states belong to; their last hidden states."""
        *inputs, hidden = mx.split(states, 3, axis=-1)
        for layer, rows, cache in zip(self.layers, inputs, caches, strict=False):
            cache.update_and_fetch(*self.target.modules.entries(layer, rows, cache.offset))
        return hidden

    def read_flight(self, flight: Pass) -> mx.array:
        """Copy the entries up to the last accepted token, and process the bonus token."""
        hidden = super().read_flight(flight)
        # Entry of the last accepted token; those beyond are junk.
        self._last = self.length + flight.num_accepted
        rows = mx.arange(self.cache.num_rows)
        seen = rows <= self._last
        # As in mlx-vlm, a window includes the position that the drafts stand at.
        window = self.network.config.text["sliding_window"]
        masks = seen, seen & (rows > self._last + 1 - window)
        self._contexts = [
            (*layer.keys_and_values(), mask)
            for layer, mask in zip(self.cache.layers, masks, strict=True)
        ]
        return self._attend(hidden, flight.root)

    def read_level(
        self, features: mx.array, tokens: mx.array, mask: DraftMask, positions: TreePositions
    ) -> mx.array:
        return self._attend(features, tokens)

    def _attend(self, features: mx.array, tokens: mx.array) -> mx.array:
        nodes = mx.broadcast_to(self._last + 1, (1, tokens.shape[0]))
        span = range(self.length, self.cache.num_rows + 1)
        with tree_positions(TreePositions(nodes, [span])):
            return self.network(features, self.network.embed(tokens, self.target), self._contexts)
