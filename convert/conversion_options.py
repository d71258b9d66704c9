"""Options of a conversion; the description of a field is also the help text of its option."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mlx_redrafter.errors import ConfigError

Dtype = Literal["float16", "bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class ConversionOptions:
    """Options of a conversion.

    A recurrence that is None is inferred from the checkpoint. A tree that is None is the one in the
    checkpoint, or else "dynamic".
    """

    dtype: Annotated[
        Dtype | None,
        "Dtype of the weights. By default float16; with --to pytorch, the stored dtype.",
    ] = None
    quantize: Annotated[bool, "Quantize the weights, as mlx-lm does.", "-q"] = False
    q_bits: Annotated[int, "Bits per weight: 2, 3, 4, 6 or 8."] = 4
    q_group_size: Annotated[int, "Weights per group: 32, 64 or 128."] = 64
    target: Annotated[
        str | None,
        "Model that the drafter is for: also check that they fit, and measure how many first "
        "drafts the model accepts.",
    ] = None
    vocab_slice: Annotated[
        int | None,
        "Draft only that many tokens, the most frequent ones of --vocab-text, which makes drafting "
        "faster (recurrent drafters and Medusa heads).",
    ] = None
    vocab_text: Annotated[
        list[Path] | None, "Text like the text to be generated; may be repeated."
    ] = None
    rnn_activation: Annotated[
        Literal["silu", "identity"] | None,
        "Activation of the RNN, if the converter cannot infer it from the weights' origin.",
    ] = None
    tree: Annotated[
        Literal["dynamic", "static"] | None,
        "Tree of Medusa heads: dynamic chooses the most probable drafts in every step, static the "
        "same ranks in every step, measured with --target.",
    ] = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if (self.vocab_slice is None) != (not self.vocab_text):
            raise ConfigError("--vocab-slice and --vocab-text need each other; give both or none")
        if self.vocab_slice is not None and self.target is None:
            raise ConfigError("--vocab-slice needs --target, whose tokenizer counts the tokens")

    @property
    def stored_as(self) -> str:
        """Form of the weights, in words."""
        if self.quantize:
            return f"{self.q_bits} bits, groups of {self.q_group_size}"
        return self.dtype or DTYPES[0]
