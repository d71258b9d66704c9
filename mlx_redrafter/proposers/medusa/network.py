"""Medusa heads as a network, and nothing about trees.

Axes: K heads, H hidden size of the target, V rows of a head, n states.

Source: arXiv 2401.10774 and FasterDecoding's ``medusa_model.py``, whose parameter names are kept
behind ``heads.``.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.proposers.draft_network import DraftNetwork
from mlx_redrafter.proposers.medusa.config import MedusaConfig
from mlx_redrafter.proposers.redrafter.network import ResBlock


class Medusa(DraftNetwork):
    """K heads that propose the target's next tokens from its last hidden state.

        x = h;  x = x + silu(linear_k,i(x));  y = output_k(x)

    Head k proposes the tokens k + 1 after the root, whatever stands between them.

    Attributes:
        config: Sizes, the calibration of the ranking, and the kind of tree.
    """

    config: MedusaConfig

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        self.heads: list[list[nn.Module]] = []
        for _ in range(config.num_heads):
            blocks = [ResBlock(config.hidden_size, config.bias) for _ in range(config.num_layers)]
            output = nn.Linear(config.hidden_size, config.head_rows, bias=False)
            self.heads.append([*blocks, output])
        if config.draft_vocab_size is not None:
            self.token_ids = mx.arange(config.draft_vocab_size, dtype=mx.int32)

    @property
    def output(self) -> Any:
        """See `DraftNetwork.output`; that of the first head."""
        return self.heads[0][-1]

    def logits(self, hidden: mx.array, head: int) -> mx.array:
        """Logits of one head.

        Args:
            hidden: The target's last hidden states after its final norm, shape (n, H).
            head: Index k of the head.

        Returns:
            Logits in the network's dtype, shape (n, V); not log-probabilities.
        """
        x = hidden.astype(self.dtype)
        for layer in self.heads[head]:
            x = layer(x)
        return x

    def log_probs(self, hidden: mx.array, head: int, scale: float = 1.0) -> mx.array:
        """Natural log-probabilities of one head, float32, shape (n, V).

        Args:
            hidden: As in `logits`.
            head: As in `logits`.
            scale: Factor on the logits.
        """
        logits = self.logits(hidden, head).astype(mx.float32) * scale
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
