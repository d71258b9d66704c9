"""EAGLE heads as others publish them, and their published equations in torch, as an oracle.

Written from SafeAILab/EAGLE (``cnets1.py``, ``cnets.py``) and vllm-project/speculators
(``models/eagle3/core.py``):

    EAGLE-1   g = fc([E x, f]);                  x = g
    EAGLE-3   g = fc([s_a, s_b, s_c]) or what was fed back;  x = [norm_e(E x), norm_g(g)]
    both      h = r + attention(x);  h = h + mlp(norm(h));  logits = head(norm(h)), EAGLE-1's
              without a norm; r is g, or norm_g(g) with norm_before_residual

with norm_before_fc on all states, fc_norm on each, and norm_output on what is fed back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

HIDDEN, WIDTH, HEADS, GROUPS, HEAD_DIM, VOCAB, DRAFT_VOCAB = 32, 48, 4, 2, 8, 64, 40
EPS = 1e-5


@dataclass(frozen=True)
class Layout:
    """One way in which heads are published.

    Attributes:
        version: 1 or 3.
        config: Keys of ``config.json`` beside those of a language model.
        layer: Keys of the layer's config: ``config.json`` itself, or an object in it.
        prefix: Prefix of the first layer.
        num_layers: Decoder layers.
        has_qk_norm: Whether queries and keys are normalised.
        num_states: States of the target that version 3 reads; ``fc`` joins several.
    """

    version: int = 3
    config: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = "midlayer"
    num_layers: int = 1
    has_qk_norm: bool = False
    num_states: int = 3

    def says(self, key: str) -> bool:
        """Whether the config, or NVIDIA's object in it, has a flag that is true."""
        return bool({**self.config, **self.config.get("eagle_config", {})}.get(key))


LAYOUTS = {
    "EAGLE-1": Layout(1, {"model_type": "llama"}, prefix="layers.0"),
    "EAGLE-1 without bias": Layout(1, {"model_type": "llama", "bias": False}, {"rope_theta": 500.0},
        "layers.0", 2),
    "EAGLE-3": Layout(3, {"model_type": "llama", "draft_vocab_size": DRAFT_VOCAB},
        {"rope_theta": 500000.0}),
    "speculators": Layout(3, {"speculators_model_type": "eagle3", "norm_before_residual": True,
        "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": None}, {"model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 200.0}}, "layers.0", 2),
    "speculators 3.1": Layout(3, {"speculators_model_type": "eagle3", "fc_norm": True,
        "norm_output": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, {"model_type": "qwen3",
        "rope_theta": 1000.0}, "layers.0", has_qk_norm=True),
    "NVIDIA": Layout(3, {"model_type": "llama", "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "norm_before_fc": True,
        "use_aux_hidden_state": True}}),
    "NVIDIA without fc": Layout(3, {"model_type": "llama", "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"use_aux_hidden_state": False, "use_last_layernorm": True}}, num_states=1),
}  # fmt: skip


def write_head(folder: Path, layout: Layout, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write a random head with the published names, shapes and dtypes; its tensors."""
    tensors = random_tensors(layout, seed)
    layer = {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": layout.num_layers,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        **layout.layer,
    }
    is_nested = "speculators_model_type" in layout.config
    config = {"transformer_layer_config": layer} if is_nested else layer
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **layout.config}))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def random_tensors(layout: Layout, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of a head by their published names, float32."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    is_third = layout.version == 3
    tensors = {"fc.weight": matrix(HIDDEN, (3 if is_third else 2) * HIDDEN)}
    if layout.num_states == 1:
        del tensors["fc.weight"]
    if not is_third and layout.config.get("bias", True):
        tensors["fc.bias"] = torch.randn(HIDDEN, generator=generator)
    for i in range(layout.num_layers):
        prefix = f"layers.{i}" if i else layout.prefix
        entering = 2 * HIDDEN if is_third and i == 0 else HIDDEN
        sizes = {"q_proj": HEADS, "k_proj": GROUPS, "v_proj": GROUPS}
        for name, heads in sizes.items():
            tensors[f"{prefix}.self_attn.{name}.weight"] = matrix(heads * HEAD_DIM, entering)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        if layout.has_qk_norm:
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{name}.weight"] = norm(HEAD_DIM)
        tensors[f"{prefix}.mlp.gate_proj.weight"] = matrix(WIDTH, HIDDEN)
        tensors[f"{prefix}.mlp.up_proj.weight"] = matrix(WIDTH, HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, WIDTH)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = norm(HIDDEN)
        if is_third or i:
            tensors[f"{prefix}.input_layernorm.weight"] = norm(HIDDEN)
    if is_third:
        tensors[f"{layout.prefix}.hidden_norm.weight"] = norm(HIDDEN)
        tensors["norm.weight"] = norm(HIDDEN)
        tensors["lm_head.weight"] = 3 * matrix(DRAFT_VOCAB, HIDDEN)
        used = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        tensors["d2t"] = used - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, used, True)
    if layout.says("norm_before_fc"):
        tensors["input_norm.weight"] = norm(3 * HIDDEN)
    if layout.config.get("fc_norm"):
        tensors.update({f"fc_norm.{i}.weight": norm(HIDDEN) for i in range(3)})
    if layout.prefix == "layers.0":
        tensors["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    return tensors


class PublishedHead:
    """A head on its published tensors, one token after another, without a cache.

    Args:
        layout: How it was published.
        tensors: Its tensors.
        embedding: The target's, shape (V, H).
        head: The target's LM head, shape (V, H).
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        head: torch.Tensor,
    ):
        self.layout = layout
        self.tensors = tensors
        self.embedding = embedding
        self.head = head
        parameters = layout.layer.get("rope_parameters", layout.layer)
        self.theta = parameters.get("rope_theta", 10000.0)

    def log_probs(
        self, states: torch.Tensor, tokens: Sequence[int], drafts: Sequence[int]
    ) -> torch.Tensor:
        """Log-probabilities after the text and after each draft, shape (1 + drafts, rows).

        Args:
            states: States after each token of the text but the last, shape (n, S).
            tokens: The tokens that came after them.
            drafts: Drafts after the text.
        """
        features = self._fuse(states)
        outputs = self._process(features, tokens)
        found = [self._head(outputs[-1:])]
        for i, draft in enumerate(drafts):
            tokens = [*tokens, draft]
            features = torch.cat([features, self._fed_back(outputs[-1:])])
            outputs = self._process(features, tokens)
            found.append(self._head(outputs[-1:]))
            assert outputs.shape[0] == len(states) + i + 1
        return torch.log_softmax(torch.cat(found), dim=-1)

    def to_ids(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.tensors["d2t"][rows] if "d2t" in self.tensors else rows

    def _fuse(self, states: torch.Tensor) -> torch.Tensor:
        if self.layout.version == 1 or self.layout.num_states == 1:
            return states
        if "input_norm.weight" in self.tensors:
            states = self._norm(states, "input_norm")
        if "fc_norm.0.weight" in self.tensors:
            parts = states.split(HIDDEN, dim=-1)
            states = torch.cat([self._norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], -1)
        return linear(states, self.tensors["fc.weight"])

    def _process(self, features: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        embedded, prefix = self.embedding[torch.tensor(list(tokens))], self.layout.prefix
        if self.layout.version == 1:
            joined = torch.cat([embedded, features], dim=-1)
            h = linear(joined, self.tensors["fc.weight"], self.tensors.get("fc.bias"))
            residual = entering = h
        else:
            normed = self._norm(features, f"{prefix}.hidden_norm")
            is_before = self.layout.config.get("norm_before_residual", False)
            residual = normed if is_before else features
            embedded = self._norm(embedded, f"{prefix}.input_layernorm")
            entering = torch.cat([embedded, normed], dim=-1)
        h = self._layer(prefix, residual, entering)
        for i in range(1, self.layout.num_layers):
            h = self._layer(f"layers.{i}", h, self._norm(h, f"layers.{i}.input_layernorm"))
        return h

    def _layer(self, prefix: str, residual: torch.Tensor, entering: torch.Tensor) -> torch.Tensor:
        h = residual + self._attend(prefix, entering)
        x = self._norm(h, f"{prefix}.post_attention_layernorm")
        gate, up, down = (
            self.tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        return h + linear(silu(linear(x, gate)) * linear(x, up), down)

    def _attend(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        num_tokens = x.shape[0]
        q, k, v = (
            linear(x, self.tensors[f"{prefix}.self_attn.{name}_proj.weight"])
            .view(num_tokens, -1, HEAD_DIM)
            .transpose(0, 1)
            for name in "qkv"
        )
        if self.layout.has_qk_norm:
            q = self._norm(q, f"{prefix}.self_attn.q_norm")
            k = self._norm(k, f"{prefix}.self_attn.k_norm")
        q, k = self._rotate(q), self._rotate(k)
        k, v = (rows.repeat_interleave(HEADS // GROUPS, dim=0) for rows in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)
        unseen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(unseen, -math.inf).softmax(-1) @ v
        mixed = mixed.transpose(0, 1).reshape(num_tokens, -1)
        return linear(mixed, self.tensors[f"{prefix}.self_attn.o_proj.weight"])

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = HEAD_DIM // 2
        frequencies = self.theta ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * cos + turned * sin

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return self.tensors[f"{name}.weight"] * (x * scale)

    def _fed_back(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._norm(outputs, "norm") if self.layout.config.get("norm_output") else outputs

    def _head(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.layout.version == 1:
            return linear(outputs, self.head)
        return linear(self._norm(outputs, "norm"), self.tensors["lm_head.weight"])
