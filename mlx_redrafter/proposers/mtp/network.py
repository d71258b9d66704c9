"""The MTP module of MiMo as a network, and nothing about search.

Axes: n tokens, H hidden size.

Source: XiaomiMiMo's checkpoints and vLLM's ``mimo_mtp.py``, whose parameter names are kept but for
those of the decoder layer, which stand behind ``block.``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import mimo
from mlx_lm.models.base import create_attention_mask

from mlx_redrafter.proposers.context_network import ContextNetwork
from mlx_redrafter.proposers.redrafter.proposer import check_sizes
from mlx_redrafter.target.target import FINAL, Target


class Mtp(ContextNetwork):
    """An MTP module, with ``h`` the target's last hidden state and ``e`` the token after it:

        x = input_proj([hidden_layernorm(h), token_layernorm(e)])
        y = final_layernorm(block(x));  logits = the target's head of y

    It was trained for one step; for further drafts ``y`` stands for ``h``.

    Args:
        values: The ``config.json`` of the model.

    Attributes:
        args: Sizes of the model, as mlx-lm reads them.
    """

    def __init__(self, values: Mapping[str, Any]):
        super().__init__()
        self.args = args = mimo.ModelArgs.from_dict(dict(values))
        hidden, eps = args.hidden_size, args.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = mimo.TransformerBlock(args)
        self.final_layernorm = nn.RMSNorm(hidden, eps=eps)

    @property
    def num_layers(self) -> int:
        """See `ContextNetwork.num_layers`."""
        return 1

    @property
    def num_rows(self) -> int:
        """See `ContextNetwork.num_rows`."""
        rows: int = self.args.vocab_size
        return rows

    @property
    def row_ids(self) -> None:
        """See `ContextNetwork.row_ids`; the head is the target's."""

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        """See `ContextNetwork.check_fit`."""
        check_sizes(self.args, target.hidden_size, target.vocab_size, tokenizer.vocab_size)

    def captured_layers(self, target: Target) -> Sequence[int]:
        """See `ContextNetwork.captured_layers`; the output of the last one alone."""
        return (FINAL,)

    def fuse(self, states: mx.array) -> mx.array:
        """See `ContextNetwork.fuse`; they stay as they are."""
        return states

    def __call__(self, features: mx.array, embeddings: mx.array, caches: Sequence[Any]) -> mx.array:
        """See `ContextNetwork.__call__`."""
        dtype = self.token_layernorm.weight.dtype
        h, e = (rows[None].astype(dtype) for rows in (features, embeddings))
        pairs = mx.concatenate([self.hidden_layernorm(h), self.token_layernorm(e)], axis=-1)
        x = self.input_proj(pairs)
        mask = create_attention_mask(x, caches[0])
        y: mx.array = self.final_layernorm(self.block(x, mask, caches[0]))
        return y[0]

    def feed_back(self, outputs: mx.array) -> mx.array:
        """See `ContextNetwork.feed_back`."""
        return outputs

    def logits(self, outputs: mx.array, target: Target) -> mx.array:
        """See `ContextNetwork.logits`; those of the target's head."""
        return target.logits(outputs)
