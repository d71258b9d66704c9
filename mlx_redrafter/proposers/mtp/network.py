"""Networks of MTP modules.

Axes: n tokens, H hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from mlx_redrafter.proposers.kind import text_values
from mlx_redrafter.proposers.kv_drafting import AutoregressiveNetwork
from mlx_redrafter.proposers.mtp.families import (
    FAMILIES,
    SIDECAR,
    model_of_layers,
    model_type_of,
    published_name,
)
from mlx_redrafter.target.hooks import FINAL
from mlx_redrafter.target.target import Target

# Keys of a model's config.json that a folder with its module alone does not need.
OF_THE_MODEL = ("architectures", "quantization", "quantization_config")


@dataclass(frozen=True)
class MtpConfig:
    """The config of a module, of the sizes that it shares with its target."""

    model_type: str
    hidden_size: int
    vocab_size: int
    values: Mapping[str, Any] = field(repr=False, compare=False)
    # The module uses the target's whole head.
    draft_vocab_size: ClassVar[None] = None
    captured_layers: ClassVar[tuple[int, ...]] = (FINAL,)

    @property
    def summary(self) -> str:
        return f"MTP module of a model of type {self.model_type}, hidden_size {self.hidden_size}"

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model_type", "hidden_size", "vocab_size")}


class Blocks(nn.Module):
    """The layers of a module of Nemotron-H, of which only attention has K/V entries."""

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        self.layers = list(layers)

    def __call__(self, x: mx.array, mask: Any, caches: Sequence[Any]) -> mx.array:
        """Process rows, shape (1, n, H)."""
        left = iter(caches)
        for layer in self.layers:
            x = layer(x, mask, next(left) if layer.block_type == "*" else None)
        return x


class Mtp(AutoregressiveNetwork):
    """An MTP module, with ``h`` the target's last hidden state and ``e`` the token after it:

        x = join([embedding_norm(e), hidden_norm(h)])     (the other way round with hidden_first)
        y = block(x);  logits = the target's head of norm(y)

    It was trained for one step; for further drafts ``y`` or ``norm(y)`` replaces ``h``.

    Args:
        values: The ``config.json`` of the model.
    """

    def __init__(self, values: Mapping[str, Any]):
        layers = model_of_layers(values).layers
        has_blocks = hasattr(layers[0], "block_type")
        norm = layers[0].norm if has_blocks else layers[0].input_layernorm
        hidden = norm.weight.shape[0]
        model_type, vocab_size = model_type_of(values), text_values(values)["vocab_size"]
        super().__init__(MtpConfig(model_type, hidden, vocab_size, values))
        self.block = Blocks(layers) if has_blocks else layers[0]
        self.num_layers = sum(one.block_type == "*" for one in layers) if has_blocks else 1
        self.family = FAMILIES[model_type]
        last = len(layers) - 1
        self.names = {old.format(last=last): own for old, own in self.family.names.items()}
        self.embedding_norm = nn.RMSNorm(hidden, eps=norm.eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=norm.eps)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=norm.eps)

    def __call__(self, features: mx.array, embeddings: mx.array, caches: Sequence[Any]) -> mx.array:
        dtype = self.embedding_norm.weight.dtype
        h, e = (rows[None].astype(dtype) for rows in (features, embeddings))
        pairs = [self.embedding_norm(e), self.hidden_norm(h)]
        if self.family.hidden_first:
            pairs.reverse()
        x = self.join(mx.concatenate(pairs, axis=-1))
        # Latent attention accepts no mask except an array.
        is_latent = "kv_a_proj_with_mqa" in self.block.get("self_attn", {})
        mask = create_attention_mask(x, caches[0], return_array=is_latent)
        return self.block(x, mask, caches if isinstance(self.block, Blocks) else caches[0])[0]

    def feed_back(self, outputs: mx.array) -> mx.array:
        return self.norm(outputs) if self.family.feeds_norm else outputs

    def logits(self, outputs: mx.array, target: Target) -> mx.array:
        return target.modules.logits(self.norm(outputs))

    def stored_config(self) -> dict[str, Any]:
        """Return the model's config, with the model type of a folder with its module alone."""
        values = {k: value for k, value in self.config.values.items() if k not in OF_THE_MODEL}
        return {**values, "model_type": self.config.model_type + SIDECAR}

    def stored_name(self, own: str) -> str:
        return published_name(own, self.names, "")
