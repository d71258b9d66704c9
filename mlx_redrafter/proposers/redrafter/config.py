"""The shape of a recurrent drafter, as stored in the ``config.json`` next to its weights."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from mlx_redrafter.checks import check_choice, check_int
from mlx_redrafter.proposers.stored_config import (
    COUPLING_WEIGHT,
    INVERSE_TEMPERATURE,
    MAX_COUNT,
    MAX_DIMENSION,
    StoredConfig,
)

MODEL_TYPE = "recurrent_drafting_drafter"
# Tensors that Apple's checkpoints may carry; their forward pass never applies them.
UNUSED_TENSORS = ("emb_norm.weight",)

Activation = Literal["silu", "identity"]


@dataclass(frozen=True)
class DrafterConfig(StoredConfig):
    """The shape of a recurrent drafter, as stored in its ``config.json``.

    Attributes:
        exit_dim: Width of the head's residual blocks; ``2 * hidden_size`` needs no projection.
        num_draft_layers: Number of residual SiLU blocks before the final linear layer.
        rnn: True for the recurrent state update, False for the plain sum of embeddings.
        rnn_activation: "silu" (Apple) or "identity" (TensorRT-LLM's linear recurrence).
        rnn_first_step_bias: False leaves ``rnn_u``'s bias out of the first step (TensorRT-LLM).
        draft_top_k: Keep only this many logits per distribution before normalising (Apple: 50),
            or None to keep them all.
        draft_vocab_size: Rows of the head when it proposes only part of the vocabulary, else None.
        inverse_temperature: See `fit_depths` (temperature scaling, Guo et al. 2017);
            ``score_scale`` in the file.
        coupling_weight: See `fit_depths`; ``noise_share`` in the file.
    """

    model_type: ClassVar[str] = MODEL_TYPE
    vocab_size: int
    hidden_size: int
    exit_dim: int
    num_draft_layers: int
    rnn: bool = False
    rnn_activation: Activation = "silu"
    rnn_first_step_bias: bool = True
    draft_top_k: int | None = None
    draft_vocab_size: int | None = None
    inverse_temperature: float = INVERSE_TEMPERATURE
    coupling_weight: float = COUPLING_WEIGHT

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("drafter exit_dim", self.exit_dim, 1, MAX_DIMENSION)
        check_int("drafter num_draft_layers", self.num_draft_layers, 0, MAX_COUNT)
        check_choice("drafter rnn_activation", self.rnn_activation, ("silu", "identity"))
        if self.draft_top_k is not None:
            check_int("drafter draft_top_k", self.draft_top_k, 1, self.vocab_size)

    @property
    def has_input_proj(self) -> bool:
        """Whether the head projects its input: by Apple's rule, if the widths differ."""
        return self.exit_dim != 2 * self.hidden_size

    @property
    def summary(self) -> str:
        state = f"RNN ({self.rnn_activation})" if self.rnn else "sum of embeddings"
        return (
            f"hidden_size {self.hidden_size}, exit_dim {self.exit_dim}, num_draft_layers "
            f"{self.num_draft_layers}, head of {self.head_rows} tokens, {state}"
        )

    @property
    def head_names(self) -> list[str]:
        """Tensors with a row for every token that the drafter proposes."""
        return [f"lm_head.{self.num_draft_layers}.weight"]

    def reduced(self, num_rows: int) -> Self:
        """Return the config of the same drafter with a head of ``num_rows`` tokens."""
        top_k = self.draft_top_k
        top_k = None if top_k is None or top_k >= num_rows else top_k
        return replace(self, draft_vocab_size=num_rows, draft_top_k=top_k)
