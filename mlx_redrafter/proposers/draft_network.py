"""Networks that propose tokens of a target from its states; each of them is a `Proposer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.decoding.protocols import Drafting
from mlx_redrafter.proposers.scores import COUPLING_WEIGHT
from mlx_redrafter.proposers.target_facts import TargetFacts
from mlx_redrafter.target.target import Target


class DraftNetwork(nn.Module, ABC):
    """A network with a head, or one that uses the target's head.

    ``token_ids``, integer of shape (V,), maps rows of the head to token ids of the target if the
    head covers only part of the vocabulary (``config.draft_vocab_size``); otherwise it is absent.

    Attributes:
        config: Sizes of the target and of the head, and the calibration of the ranking.
    """

    config: Any
    token_ids: mx.array

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        return (self,)

    @property
    def num_layers(self) -> int:
        return 0

    @property
    def num_rows(self) -> int:
        rows: int = self.config.head_rows
        return rows

    @property
    def max_length(self) -> int | None:
        return None

    @property
    def row_ids(self) -> mx.array | None:
        """Token ids of the rows of the head; None if row and id are the same."""
        ids: mx.array | None = self.get("token_ids")
        return ids

    @property
    def coupling_weight(self) -> float:
        """Weight of the target's noise when it ranks drafts, 0 to 1."""
        weight: float = getattr(self.config, "coupling_weight", COUPLING_WEIGHT)
        return weight

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        sizes = target.hidden_size, target.vocab_size, tokenizer.vocab_size
        TargetFacts(None, *sizes).check(self.config)

    @abstractmethod
    def open(
        self, target: Target, prompt: Sequence[int], couple_noise: bool, cached: Sequence[Any]
    ) -> Drafting: ...

    def to_token_ids(self, rows: mx.array) -> mx.array:
        """Return token ids, int32, of rows of the head; any shape."""
        ids = self.row_ids
        return (rows if ids is None else ids[rows]).astype(mx.int32)

    def stored_config(self) -> dict[str, Any]:
        """Return the keys of ``config.json`` that describe the network."""
        values: dict[str, Any] = self.config.to_dict()
        return values

    def stored_name(self, own: str) -> str:
        """Return the name that a parameter has in the network's checkpoint."""
        return own


class ResBlock(nn.Module):
    """``x + silu(linear(x))``, shape (W, D) to (W, D)."""

    def __init__(self, dims: int, bias: bool = True):
        super().__init__()
        self.linear = nn.Linear(dims, dims, bias)

    def __call__(self, x: mx.array) -> mx.array:
        return x + nn.silu(self.linear(x))


def dtype_of(layer: Any) -> mx.Dtype:
    """Return the floating-point dtype that a linear layer computes in, quantised or not."""
    dtype: mx.Dtype = layer.scales.dtype if "scales" in layer else layer.weight.dtype
    return dtype
