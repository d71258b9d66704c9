"""MTP modules as networks, and nothing about search.

Axes: n tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from mlx_redrafter.proposers.kv_network import AutoregressiveNetwork
from mlx_redrafter.proposers.mtp.families import (
    FAMILIES,
    model_type_of,
    one_layer_model,
    text_values,
)
from mlx_redrafter.proposers.redrafter.proposer import check_sizes
from mlx_redrafter.target.target import FINAL, Target


@dataclass(frozen=True)
class MtpConfig:
    """What a module must have in common with its target.

    Attributes:
        model_type: Type of the model that it was trained with.
        hidden_size: Hidden size of both, H.
        vocab_size: Size of the vocabulary.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    # Its head is the target's, whole.
    draft_vocab_size: ClassVar[None] = None

    @property
    def summary(self) -> str:
        """Kind and sizes, in words."""
        return f"MTP module of a model of type {self.model_type}, hidden_size {self.hidden_size}"

    def to_dict(self) -> dict[str, Any]:
        """The values by their names."""
        return asdict(self)


class Mtp(AutoregressiveNetwork):
    """An MTP module, with ``h`` the target's last hidden state and ``e`` the token after it:

        x = join([embedding_norm(e), hidden_norm(h)])     (the other way round with hidden_first)
        y = block(x);  logits = the target's head of norm(y)

    It was trained for one step; for further drafts ``y`` or ``norm(y)`` stands for ``h``.

    Args:
        values: The ``config.json`` of the model.

    Attributes:
        config: Type and sizes of the model.
        family: Order of what is joined, and what is fed back.
    """

    def __init__(self, values: Mapping[str, Any]):
        super().__init__()
        self.block = one_layer_model(values).layers[0]
        norm = self.block.input_layernorm
        hidden = norm.weight.shape[0]
        model_type = model_type_of(values)
        self.config = MtpConfig(model_type, hidden, text_values(values)["vocab_size"])
        self.family = FAMILIES[model_type]
        self.embedding_norm = nn.RMSNorm(hidden, eps=norm.eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=norm.eps)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=norm.eps)

    @property
    def num_layers(self) -> int:
        """See `KvNetwork.num_layers`."""
        return 1

    @property
    def num_rows(self) -> int:
        """See `KvNetwork.num_rows`."""
        return self.config.vocab_size

    @property
    def row_ids(self) -> None:
        """See `KvNetwork.row_ids`; the head is the target's."""

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """See `KvNetwork.check_fit`."""
        check_sizes(self.config, target.hidden_size, target.vocab_size, tokenizer.vocab_size)

    def captured_layers(self, target: Target) -> Sequence[int]:
        """See `KvNetwork.captured_layers`; the output of the last one alone."""
        return (FINAL,)

    def fuse(self, states: mx.array) -> mx.array:
        """See `KvNetwork.fuse`; they stay as they are."""
        return states

    def __call__(self, features: mx.array, embeddings: mx.array, caches: Sequence[Any]) -> mx.array:
        """See `KvNetwork.__call__`."""
        dtype = self.embedding_norm.weight.dtype
        h, e = (rows[None].astype(dtype) for rows in (features, embeddings))
        pairs = [self.embedding_norm(e), self.hidden_norm(h)]
        if self.family.hidden_first:
            pairs.reverse()
        x = self.join(mx.concatenate(pairs, axis=-1))
        # Attention to latent rows takes no mask but an array.
        is_latent = "kv_a_proj_with_mqa" in self.block.self_attn
        mask = create_attention_mask(x, caches[0], return_array=is_latent)
        y: mx.array = self.block(x, mask, caches[0])
        return y[0]

    def feed_back(self, outputs: mx.array) -> mx.array:
        """See `AutoregressiveNetwork.feed_back`."""
        return self.norm(outputs) if self.family.feeds_norm else outputs

    def logits(self, outputs: mx.array, target: Target) -> mx.array:
        """See `AutoregressiveNetwork.logits`; those of the target's head."""
        return target.logits(self.norm(outputs))
