"""SpecFormer, which proposes several tokens after one pass of its own.

Axes: n tokens, H hidden size, S slots, V vocabulary.

Source: ``SDDE/predicter.py`` of ShiLuohe/SpecFormer, whose parameter names are kept. The rotary
embeddings there are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask

from mlx_redrafter.checks import check_int
from mlx_redrafter.decoding.protocols import Group
from mlx_redrafter.draft_plan import MAX_BEAM_LENGTH, DraftShape
from mlx_redrafter.proposers.checkpoint import Checkpoint
from mlx_redrafter.proposers.draft_network import GatedMlp
from mlx_redrafter.proposers.kind import UNKNOWN, Shapes, TargetFacts
from mlx_redrafter.proposers.kv_drafting import KvNetwork, read_flights
from mlx_redrafter.proposers.layer_sizes import (
    LayerSizes,
    build,
    check_captured_layers,
    layer_arguments,
)
from mlx_redrafter.proposers.linked_levels import search_slots
from mlx_redrafter.proposers.search import Expansion, NoiseRank
from mlx_redrafter.proposers.stored_config import MAX_COUNT
from mlx_redrafter.target.hooks import FINAL
from mlx_redrafter.target.target import Target

NAME = "SpecFormer"


def recognise(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return config.get("model_type") == SpecFormerConfig.model_type


def load(path_or_repo: str | Path, target: TargetFacts = UNKNOWN) -> SpecFormer:
    stored = Checkpoint(path_or_repo)
    config = SpecFormerConfig.from_dict(stored.config)
    target.check(config)
    return stored.fill(build(SpecFormer, config))


@dataclass(frozen=True)
class SpecFormerConfig(LayerSizes):
    """The shape of a SpecFormer, as stored in the ``config.json`` next to its weights.

    Attributes:
        captured_layers: Layers of the target whose inputs it reads, -1 for its last hidden states.
        num_slots: Number of tokens that it drafts, S.
    """

    model_type: ClassVar[str] = "redrafter_specformer"
    captured_layers: tuple[int, ...]
    num_slots: int
    # The network uses the target's whole head.
    draft_vocab_size: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_captured_layers(self.captured_layers, FINAL)
        check_int("num_slots", self.num_slots, 1, MAX_COUNT)

    @property
    def summary(self) -> str:
        return (
            f"SpecFormer of {self.num_slots} slots, hidden_size {self.hidden_size}, "
            f"intermediate_size {self.intermediate_size}, reads {len(self.captured_layers)} layers"
        )


class SpecFormer(KvNetwork):
    """A network that drafts S tokens in one pass, from the states before the root alone.

    With ``s_c`` the target's states, ``A`` causal attention over the text and ``E`` over the slots:

        f = down_samp([norms_c(s_c)]);   h = f + A(norm(f))
        x = positional(norm(h)) as S rows;   x = x + E(norm(x));   x = x + mlp(norm(x))
        logits = the target's head of the target's final norm of x

    Slot i proposes the token i + 1 after the root, whatever tokens stand between them. The SiLU of
    the MLP is on the other matrix than in Llama.
    """

    num_layers = 1

    def __init__(self, config: SpecFormerConfig):
        super().__init__(config)
        self.max_length = min(1 + config.num_slots, MAX_BEAM_LENGTH)
        hidden, count = config.hidden_size, len(config.captured_layers)
        values = {**layer_arguments(config), "model_type": "llama", "num_hidden_layers": 1}
        args = llama.ModelArgs.from_dict(values)

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden, eps=config.rms_norm_eps)

        self.norms = [norm() for _ in range(count)]
        self.down_samp = nn.Linear(count * hidden, hidden, bias=False)
        self.decoder_input_norm = norm()
        self.decoder_att = llama.Attention(args)
        self.positional_input_norm = norm()
        self.positional = nn.Linear(hidden, config.num_slots * hidden)
        self.encoder_input_norm = norm()
        self.encoder_att = llama.Attention(args)
        self.encoder_ffn_input_norm = norm()
        self.encoder_ffn = GatedMlp(
            hidden, config.intermediate_size, lambda gate, up: gate * nn.silu(up)
        )

    def check_fit(self, target: Target, tokenizer: Any) -> None:
        super().check_fit(target, tokenizer)
        # Refuses one without such a norm.
        target.modules.normalise(mx.zeros((1, target.hidden_size)))

    def fuse(self, states: mx.array) -> mx.array:
        states = states.astype(self.decoder_input_norm.weight.dtype)
        parts = mx.split(states, len(self.norms), axis=-1)
        normalised = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
        return self.down_samp(mx.concatenate(normalised, axis=-1))

    def __call__(self, features: mx.array, embeddings: mx.array, caches: Sequence[Any]) -> mx.array:
        """Process the features; the network does not read the embeddings."""
        x = features[None]
        mask = create_attention_mask(x, caches[0])
        return (x + self.decoder_att(self.decoder_input_norm(x), mask, caches[0]))[0]

    def slots(self, outputs: mx.array, count: int) -> mx.array:
        """Compute states of the first slots of each pair, shape (n, H) to (n, ``count``, H)."""
        x = self.positional(self.positional_input_norm(outputs))
        # No slot sees a later one.
        x = x.reshape(len(outputs), -1, outputs.shape[-1])[:, :count]
        mask: Any = "causal" if count > 1 else None
        x = x + self.encoder_att(self.encoder_input_norm(x), mask)
        return x + self.encoder_ffn(self.encoder_ffn_input_norm(x))

    def logits(self, slots: mx.array, target: Target) -> mx.array:
        """Compute logits of the tokens of slots, shape (n, H) to (n, V), or more columns."""
        return target.modules.logits(target.modules.normalise(slots))

    def expand(self, group: Group, shape: DraftShape, rank: NoiseRank | None) -> Expansion:
        slots = self.slots(read_flights(group), shape.levels)
        logits = self.logits(slots.reshape(-1, slots.shape[-1]), group[0][0].target)
        unary = logits[:, : self.num_rows].astype(mx.float32)
        unary = unary.reshape(len(group), shape.levels, -1)
        return search_slots(unary, shape, rank, self.to_token_ids)
