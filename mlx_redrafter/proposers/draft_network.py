"""What networks have in common whose heads propose all or some tokens of a target."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class DraftNetwork(nn.Module):
    """A network with a head.

    ``token_ids``, integer of shape (V,), maps rows of the head to token ids of the target when the
    head covers only part of the vocabulary (``config.draft_vocab_size``); otherwise it is absent.

    Attributes:
        config: Sizes of the target and of the head, and the calibration of the ranking.
    """

    config: Any
    token_ids: mx.array

    @property
    def output(self) -> Any:
        """A linear layer with a row for every token that is proposed, quantised or not."""
        raise NotImplementedError

    @property
    def has_draft_vocab(self) -> bool:
        """Whether the head covers only part of the vocabulary."""
        return self.config.draft_vocab_size is not None

    @property
    def dtype(self) -> mx.Dtype:
        """The floating-point dtype the network computes in."""
        head = self.output
        dtype: mx.Dtype = head.scales.dtype if "scales" in head else head.weight.dtype
        return dtype

    @property
    def quantization(self) -> dict[str, int] | None:
        """``group_size`` and ``bits`` of quantised weights; None where there are none."""
        return quantization_of(self)

    def to_token_ids(self, rows: mx.array) -> mx.array:
        """Token ids, int32, of rows of the head; any shape."""
        if not self.has_draft_vocab:
            return rows.astype(mx.int32)
        return self.token_ids[rows].astype(mx.int32)


def quantization_of(network: nn.Module) -> dict[str, int] | None:
    """``group_size`` and ``bits`` of quantised weights; None where there are none."""
    layer: Any = next((module for module in network.modules() if "scales" in module), None)
    return None if layer is None else {"group_size": layer.group_size, "bits": layer.bits}
