"""The shape of a SpecFormer, as stored in the ``config.json`` next to its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlx_redrafter.checks import check_int
from mlx_redrafter.proposers.layer_sizes import LayerSizes, check_captured_layers
from mlx_redrafter.target.modules import FINAL

MODEL_TYPE = "redrafter_specformer"
# Largest number of slots that a config file may claim, far above any network.
MAX_SLOTS = 64


@dataclass(frozen=True)
class SpecFormerConfig(LayerSizes):
    """The shape of a SpecFormer.

    Attributes:
        captured_layers: Layers of the target whose inputs it reads, -1 for its last hidden states.
        num_slots: Number of tokens that it drafts, S.
    """

    model_type: ClassVar[str] = MODEL_TYPE
    captured_layers: tuple[int, ...]
    num_slots: int
    # The network uses the target's whole head.
    draft_vocab_size: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = check_captured_layers(self.captured_layers, FINAL)
        object.__setattr__(self, "captured_layers", layers)
        check_int("num_slots", self.num_slots, 1, MAX_SLOTS)

    @property
    def summary(self) -> str:
        return (
            f"SpecFormer of {self.num_slots} slots, hidden_size {self.hidden_size}, "
            f"intermediate_size {self.intermediate_size}, reads {len(self.captured_layers)} layers"
        )
