"""EAGLE heads as others publish them, and their equations in torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers import torch_heads

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


def published_head(
    layout: Layout, tensors: Mapping[str, torch.Tensor], embedding: torch.Tensor, head: torch.Tensor
) -> torch_heads.Head:
    """A head on its published tensors, of a target with this embedding and LM head."""
    parameters = layout.layer.get("rope_parameters", layout.layer)
    frozen = torch_heads.Frozen(embedding, head, torch.ones(()), EPS, EPS)
    layer = torch_heads.Layer(HEADS, GROUPS, parameters.get("rope_theta", 10000.0))
    flags = {key: layout.says(key) for key in ("norm_before_residual", "norm_output")}
    return torch_heads.eagle(tensors, frozen, layer, layout.version, layout.prefix, **flags)
