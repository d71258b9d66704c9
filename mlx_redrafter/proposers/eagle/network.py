"""The networks of EAGLE-1 and EAGLE-3.

Axes: n tokens, H hidden size, C states of the target, V rows of the head.

Sources: arXiv 2401.15077, 2406.16858 and 2503.01840, SafeAILab/EAGLE (``cnets1.py``, ``cnets.py``)
and vllm-project/speculators (``models/eagle3``), whose parameter names are kept.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3
from mlx_lm.models.base import create_attention_mask

from mlx_redrafter.decoding.passes import Pass
from mlx_redrafter.decoding.protocols import Group
from mlx_redrafter.draft_plan import DraftShape
from mlx_redrafter.proposers.eagle.config import EagleConfig
from mlx_redrafter.proposers.kv_drafting import AutoregressiveNetwork, KvDrafting
from mlx_redrafter.proposers.layer_sizes import complete_yarn, layer_arguments
from mlx_redrafter.proposers.linked_levels import search_slots
from mlx_redrafter.proposers.search import Expansion, NoiseRank, log_probs
from mlx_redrafter.target.hooks import FINAL
from mlx_redrafter.target.target import Target
from mlx_redrafter.trees.tree import TokenTree


class FirstLayer(nn.Module):
    """A decoder layer of mlx-lm with another input to its attention.

    EAGLE-1 has no norm there. With ``e`` the embedding and ``g`` the feature, EAGLE-3's is

        h = r + attention([input_layernorm(e), hidden_norm(g)])
        h = h + mlp(post_attention_layernorm(h))

    where the residual ``r`` is ``g``, or ``hidden_norm(g)`` with ``norm_before_residual``.
    """

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        layer = _decoder_layer(config)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if config.version == 3:
            for name in ("q_proj", "k_proj", "v_proj"):
                rows = self.self_attn[name].weight.shape[0]
                self.self_attn[name] = nn.Linear(2 * hidden, rows, bias=config.attention_bias)
            self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
            self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def __call__(self, features: mx.array, embeddings: mx.array, mask: Any, cache: Any) -> mx.array:
        """Process features and embeddings, shape (1, n, H); EAGLE-1's features hold the tokens."""
        x = features
        if self.config.version == 3:
            normalised = self.hidden_norm(features)
            x = mx.concatenate([self.input_layernorm(embeddings), normalised], axis=-1)
            features = normalised if self.config.norm_before_residual else features
        h = features + self.self_attn(x, mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle(AutoregressiveNetwork):
    """An EAGLE head. EAGLE-1 uses the target's head."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        self.num_layers, self.max_length = config.num_hidden_layers, config.max_length
        self.is_joint = config.mask_token_id is None
        hidden, eps = config.hidden_size, config.rms_norm_eps
        joined = config.num_captured if config.version == 3 else 2
        if not config.reads_hidden_state:
            self.fc = nn.Linear(joined * hidden, hidden, bias=config.fc_bias)
        rest = [_decoder_layer(config) for _ in range(1, config.num_hidden_layers)]
        self.layers = [FirstLayer(config), *rest]
        if config.version == 3:
            self.norm = nn.RMSNorm(hidden, eps=eps)
            self.lm_head = nn.Linear(hidden, config.head_rows, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(joined * hidden, eps=eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(hidden, eps=eps) for _ in range(joined)]
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if config.mask_token_id is not None:
            self.mask_hidden = mx.zeros((1, 1, joined * hidden))

    @property
    def dtype(self) -> mx.Dtype:
        return self.layers[0].post_attention_layernorm.weight.dtype

    def embed(self, tokens: mx.array, target: Target) -> mx.array:
        embed = self.embed_tokens if self.config.own_embedding else target.modules.embed
        return embed(tokens)

    def captured_layers(self, target: Target) -> Sequence[int]:
        if self.config.version == 1 or self.config.reads_hidden_state:
            return (FINAL,)
        if self.config.captured_layers is not None:
            return self.config.captured_layers
        num_blocks = len(target.modules.layers)
        return 2, num_blocks // 2, num_blocks - 3

    def fuse(self, states: mx.array) -> mx.array:
        """Join the captured states; the target's hidden state alone stays as it is."""
        if self.config.version == 1:
            return states
        states = states.astype(self.dtype)
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = mx.split(states, len(self.fc_norm), axis=-1)
            normalised = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = mx.concatenate(normalised, axis=-1)
        return self.fc(states) if "fc" in self else states

    def __call__(self, features: mx.array, embeddings: mx.array, caches: Sequence[Any]) -> mx.array:
        h, embeddings = (rows[None].astype(self.dtype) for rows in (features, embeddings))
        if self.config.version == 1:
            h = self.fc(mx.concatenate([embeddings, h], axis=-1))
        for layer, cache, window in zip(self.layers, caches, self.config.windows, strict=True):
            # Asked for just before the layer, so that its cache recognises the mask as its own.
            mask = create_attention_mask(h, cache, window_size=window)
            if layer is self.layers[0]:
                h = layer(h, embeddings, mask, cache)
            else:
                h = layer(h, mask, cache)
        return h[0]

    def feed_back(self, outputs: mx.array) -> mx.array:
        return self.norm(outputs) if self.config.norm_output else outputs

    def logits(self, outputs: mx.array, target: Target) -> mx.array:
        if self.config.version == 1:
            return target.modules.logits(outputs)
        return self.lm_head(self.norm(outputs))

    def expand(self, group: Group, shape: DraftShape, rank: NoiseRank | None) -> Expansion:
        if self.is_joint:
            return super().expand(group, shape, rank)
        scores = self.parallel_scores(*group[0], shape.levels)
        return search_slots(scores[None], shape, rank, self.to_token_ids)

    def parallel_scores(self, drafting: KvDrafting, flight: Pass, count: int) -> mx.array:
        """Compute log-probabilities of a P-EAGLE head's first depths, shape (``count``, V).

        Source: speculators' ``models/peagle/core.py``. The entry of a depth after the first is that
        of the mask token and of ``mask_hidden``, in place of a draft and of its feature. So the
        drafts of a depth do not depend on those above. Its window ends with it.
        """
        outputs = [drafting.read_flight(flight)]
        if (masked := count - 1) > 0:
            tokens = mx.full((masked,), self.config.mask_token_id, dtype=mx.int32)
            hidden = self.mask_hidden[0]
            features = self.fuse(mx.broadcast_to(hidden, (masked, hidden.shape[-1])))
            chain = TokenTree.chain(tokens)
            mask, positions = drafting.lineage_after(flight).start_at_nodes(chain)
            mask = mask._replace(moved=1 + chain.depths[:, None])
            outputs.append(drafting.read_level(features, tokens, mask, positions))
        return log_probs(self.logits(mx.concatenate(outputs), drafting.target), self.num_rows)


def _decoder_layer(config: EagleConfig) -> nn.Module:
    values = {
        **layer_arguments(config),
        "model_type": config.layer_type,
        "num_hidden_layers": config.num_hidden_layers,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    kind: Any = qwen3 if config.layer_type == "qwen3" else llama
    layer = kind.TransformerBlock(kind.ModelArgs.from_dict(values))
    complete_yarn(layer.self_attn.rope, config)
    return layer
