"""EAGLE heads as others publish them, and their equations in torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.helpers import published_heads, torch_heads
from tests.helpers.mtp import write
from tests.helpers.published_heads import DRAFT_VOCAB, HIDDEN, LAYER, VOCAB


@dataclass(frozen=True)
class Layout:
    """One way in which heads are published.

    Attributes:
        version: 1 or 3.
        config: Keys of ``config.json`` beside those of a language model.
        layer: Keys of the layer's config: ``config.json`` itself, or an object in it.
        prefix: Prefix of the first layer.
        num_layers: Decoder layers.
        num_states: States of the target that version 3 reads; ``fc`` joins several.
    """

    version: int = 3
    config: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = "midlayer"
    num_layers: int = 1
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
        "rope_theta": 1000.0}, "layers.0"),
    "NVIDIA": Layout(3, {"model_type": "llama", "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "norm_before_fc": True,
        "use_aux_hidden_state": True}}),
    "NVIDIA without fc": Layout(3, {"model_type": "llama", "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"use_aux_hidden_state": False, "use_last_layernorm": True}}, num_states=1),
}  # fmt: skip


def write_head(folder: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """Write a random head with the published names, shapes and dtypes; its tensors."""
    layer = {**LAYER, "model_type": "llama", "num_hidden_layers": layout.num_layers, **layout.layer}
    is_nested = "speculators_model_type" in layout.config
    config = {"transformer_layer_config": layer} if is_nested else layer
    tensors = random_tensors(layout, layer)
    write(folder, tensors, {**config, **layout.config})
    return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}


def random_tensors(layout: Layout, layer: Mapping[str, Any]) -> published_heads.Tensors:
    """Draw the tensors of a head by their published names."""
    if layout.version == 1:
        shapes = published_heads.layer_shapes(layer, HIDDEN) | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
        del shapes["layers.0.input_layernorm.weight"]
        if layout.config.get("bias", True):
            shapes["fc.bias"] = (HIDDEN,)
    else:
        flags = {key: layout.says(key) for key in ("norm_before_fc", "fc_norm")}
        shapes = published_heads.eagle_3_shapes(layer, flags)
        if layout.num_states == 1:
            del shapes["fc.weight"]
    if layout.prefix == "layers.0":
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    shapes = {name.replace("layers.0", layout.prefix): shape for name, shape in shapes.items()}
    draw = published_heads.seeded if layout.version == 1 else published_heads.eagle_3_tensors
    return draw(shapes, seed=0)


def published_head(
    layout: Layout, tensors: Mapping[str, torch.Tensor], embedding: torch.Tensor, head: torch.Tensor
) -> torch_heads.Head:
    """A head on its published tensors, of a target with this embedding and LM head."""
    parameters = layout.layer.get("rope_parameters", layout.layer)
    eps, heads, keys = (
        LAYER[name] for name in ("rms_norm_eps", "num_attention_heads", "num_key_value_heads")
    )
    frozen = torch_heads.Frozen(embedding, head, torch.ones(()), eps, eps)
    layer = torch_heads.Layer(heads, keys, parameters.get("rope_theta", 10000.0))
    flags = {key: layout.says(key) for key in ("norm_before_residual", "norm_output")}
    return torch_heads.eagle(tensors, frozen, layer, layout.version, layout.prefix, **flags)
